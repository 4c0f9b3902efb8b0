"""Operands of an edge on their way to shared memory: which warp copies what, as text.

Each warp has a ring of stages of its own and shares it with nobody, so its copies need no barrier of the block. A
stage holds, for each w operand, the slice of each path's column, then for each x operand the slice of the x block.
"""

from dataclasses import dataclass

from jaxcg.codegen.problem import RoleLayout
from jaxcg.schedule.shared import w_copy_bytes, x_copy_bytes


@dataclass(frozen=True)
class Stage:
    """Places in a stage, in elements.

    Attributes:
        w: operand -> place of its first path's slice; the others follow.
        x: operand -> place of its slice.
        gradient: place through which x gradients leave in layout mul_ir.
        size: elements of a stage; 0 if nothing is copied.
    """

    w: dict[int, int]
    x: dict[int, int]
    gradient: int
    size: int


def lay_out(layout: RoleLayout, size: int) -> Stage:
    """Places of the operands in a stage of `size` elements."""
    problem, at = layout.problem, 0
    w: dict[int, int] = {}
    x: dict[int, int] = {}
    for operand in problem.operands("w"):
        w[operand] = at
        at += len(layout.paths) * layout.slice
    gradient = at
    for operand in problem.operands("x"):
        x[operand] = at
        at += (2 * layout.paths[0].l1 + 1) * layout.slice
    return Stage(w, x, gradient, size)


def _copy_run(
    layout: RoleLayout, to: int, start: str, length: int, count: int, distance: int, width: int, exists: str
) -> list[str]:
    """Copies of `count` segments of `length` elements, `distance` apart in global memory, packed in the stage.

    `exists` is a bound on the element number within a segment, empty if all exist.
    """
    unit = width // layout.problem.number.itemsize
    units = length // unit
    lines: list[str] = []
    for turn in range(-(-count * units // 32)):
        guard = ""
        if count == 1:
            source, element = f"{32 * turn * unit} + {unit} * lane", f"{32 * turn * unit} + {unit} * lane"
            if 32 * (turn + 1) > units:
                guard = f"if (lane < {units - 32 * turn}) "
        elif units >= 32:
            segment, part = divmod(turn, units // 32)
            element = f"{32 * part * unit} + {unit} * lane"
            source = f"{segment * distance} + {element}"
        else:
            each = 32 // units
            element = f"{unit} * (lane % {units})"
            source = f"{turn * each * distance} + {distance} * (lane / {units}) + {element}"
            if each * (turn + 1) > count:
                guard = f"if (lane / {units} < {count - each * turn}) "
        test = f"{element} < {exists}" if exists else "true"
        place = f"stage + {to + 32 * turn * unit} + {unit} * lane"
        lines.append(f"{guard}queue.copy<{width}>({place}, {start} + {source}, {test});")
    return lines


def _uniform_runs(offsets: list[int]) -> list[tuple[int, int, int]]:
    """Cut offsets into runs of equal distance: (first index, count, distance)."""
    runs: list[tuple[int, int, int]] = []
    at = 0
    while at < len(offsets):
        count, distance = 1, 0
        if at + 1 < len(offsets):
            distance = offsets[at + 1] - offsets[at]
            while at + count < len(offsets) and offsets[at + count] == offsets[at] + count * distance:
                count += 1
        runs.append((at, count, distance))
        at += count
    return runs


def render_fetch(layout: RoleLayout, stage: Stage, name: str) -> list[str]:
    """The function that starts the copies of one edge into a stage."""
    problem, coupling, paths = layout.problem, layout.problem.coupling, layout.paths
    itemsize = problem.number.itemsize
    lines = [
        f"__device__ __forceinline__ void {name}(const Args& args, CopyQueue& queue, T* stage, long long edge, "
        "long long sender, int lane, int chunk) {",
        f"  const int exist = {layout.mul} - {layout.slice} * chunk;  // channels from this slice's first to the end",
        "  (void)exist;",
    ]
    channels = "" if layout.full else "exist"
    offsets = [path.weight_offset or 0 for path in paths]
    for operand, place in stage.w.items():
        lines.append(
            f"  const T* const w{operand} = {problem.operand(operand)} + edge * {coupling.weight_numel}ll"
            f" + {layout.slice} * chunk;"
        )
        for first, count, distance in _uniform_runs(offsets):
            lines += [
                "  " + line
                for line in _copy_run(
                    layout,
                    place + first * layout.slice,
                    f"w{operand} + {offsets[first]}",
                    layout.slice,
                    count,
                    distance,
                    w_copy_bytes(coupling, paths, itemsize),
                    channels,
                )
            ]
    block = 2 * paths[0].l1 + 1
    for operand, place in stage.x.items():
        row = f"{problem.operand(operand)} + sender * {coupling.dim_in1}ll + {paths[0].in1_offset}"
        width = x_copy_bytes(coupling, paths[0], itemsize)
        if coupling.layout == "ir_mul":
            lines.append(f"  const T* const x{operand} = {row} + {layout.slice} * chunk;")
            copies = _copy_run(layout, place, f"x{operand}", layout.slice, block, layout.mul, width, channels)
        else:
            lines.append(f"  const T* const x{operand} = {row} + {layout.slice * block} * chunk;")
            exist = "" if layout.full else f"exist * {block}"
            copies = _copy_run(layout, place, f"x{operand}", layout.slice * block, 1, 0, width, exist)
        lines += ["  " + line for line in copies]
    return [*lines, "}"]
