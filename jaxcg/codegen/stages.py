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


@dataclass(frozen=True)
class _Copy:
    """One copy of `width` bytes by each lane.

    Attributes:
        to: element of the stage, for lane 0; lanes follow each other.
        source: pointer that this lane copies from.
        start: element beyond that pointer.
        width: bytes.
        lanes: number of lanes that take part.
        exists: condition that what this lane copies exists.
        once: whether nobody reads it again.
    """

    to: int
    source: str
    start: int
    width: int
    lanes: int
    exists: str
    once: bool


@dataclass(frozen=True)
class Fetch:
    """The copies of one edge, and what each lane keeps to make them.

    Attributes:
        declarations: statements before the loop: pointers, for edge 0 and x row 0.
        rows: for each pointer, the row that it advances by: "edge" or "sender", and the elements of a row.
        text: of the function.
        name: of the function.
    """

    declarations: tuple[str, ...]
    rows: tuple[tuple[str, str, int], ...]
    text: tuple[str, ...]
    name: str

    def call(self, place: str, edge: str, sender: str) -> str:
        """Statement that starts the copies of an edge to a place."""
        given = [f"{name} + {edge if row == 'edge' else sender} * {size}ll" for name, row, size in self.rows]
        return f"{self.name}(queue, {', '.join([place, *given, 'lane', 'room'])});"


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


class _Plan:
    """Collects copies and the pointers that they start from."""

    def __init__(self, layout: RoleLayout) -> None:
        self.layout = layout
        self.copies: list[_Copy] = []
        self.sources: dict[tuple[str, str], str] = {}

    def source(self, operand: str, lane: str) -> str:
        """Name of the pointer to `operand` for this lane."""
        return self.sources.setdefault((operand, lane), f"{operand}_from{len(self.sources)}")

    def run(
        self, operand: str, to: int, start: int, length: int, count: int, distance: int, width: int,
        existing: str | None, once: bool,
    ) -> None:  # fmt: skip
        """Copies of `count` segments of `length` elements, `distance` apart in memory, packed in the stage.

        `existing`: how many elements of each segment exist, None for all.
        """
        unit = width // self.layout.problem.number.itemsize
        units = length // unit
        for turn in range(-(-count * units // 32)):
            lanes = min(32, count * units - 32 * turn)
            if count == 1 or units >= 32:
                segment, part = divmod(turn, max(1, units // 32)) if count > 1 else (0, turn)
                name = self.source(operand, f"{unit} * lane")
                first, before = segment * distance + 32 * part * unit, 32 * part * unit
                within = f"{unit} * lane"
            else:
                within = f"{unit} * (lane % {units})"
                name = self.source(operand, f"{distance} * (lane / {units}) + {within}")
                first, before = turn * (32 // units) * distance, 0
            exists = "true" if existing is None else f"{before} + {within} < {existing}"
            self.copies.append(_Copy(to + 32 * turn * unit, name, start + first, width, lanes, exists, once))


def plan_fetch(layout: RoleLayout, stage: Stage, name: str) -> Fetch:
    """Plan the copies of one edge into a stage."""
    problem, coupling, paths = layout.problem, layout.problem.coupling, layout.paths
    itemsize = problem.number.itemsize
    plan = _Plan(layout)
    room = None if layout.full else "room"
    bases: dict[str, tuple[str, str, int]] = {}
    offsets = [path.weight_offset or 0 for path in paths]
    w_width, x_width = w_copy_bytes(coupling, paths, itemsize), x_copy_bytes(coupling, paths[0], itemsize)
    for operand, place in stage.w.items():
        bases[f"w{operand}"] = (f"{problem.operand(operand)} + {layout.slice} * chunk", "edge", coupling.weight_numel)
        for first, count, distance in _uniform_runs(offsets):
            to = place + first * layout.slice
            plan.run(f"w{operand}", to, offsets[first], layout.slice, count, distance, w_width, room, True)
    block = 2 * paths[0].l1 + 1
    each = 1 if coupling.layout == "ir_mul" else block
    room_of_block = room if room is None or each == 1 else f"{room} * {each}"
    for operand, place in stage.x.items():
        start = paths[0].in1_offset
        bases[f"x{operand}"] = (
            f"{problem.operand(operand)} + {layout.slice * each} * chunk",
            "sender",
            coupling.dim_in1,
        )
        if coupling.layout == "ir_mul":
            plan.run(f"x{operand}", place, start, layout.slice, block, layout.mul, x_width, room_of_block, False)
        else:
            plan.run(f"x{operand}", place, start, layout.slice * block, 1, 0, x_width, room_of_block, False)
    declarations = [f"const int room = {layout.mul} - {layout.slice} * chunk;  // channels from this slice's first on"]
    rows: list[tuple[str, str, int]] = []
    for (operand, lane), pointer in plan.sources.items():
        base, row, size = bases[operand]
        declarations.append(f"const T* const {pointer} = {base} + {lane};")
        rows.append((pointer, row, size))
    parameters = ["CopyQueue& queue", "SharedAddress to", *(f"const T* {pointer}" for pointer in plan.sources.values())]
    lines = [
        f"__device__ __forceinline__ void {name}({', '.join([*parameters, 'int lane', 'int room'])}) {{",
        "  (void)lane, (void)room;",
    ]
    for one in plan.copies:
        guard = f"if (lane < {one.lanes}) " if one.lanes < 32 else ""
        # A lane's place is `width` bytes beyond its neighbour's; `to` is lane 0's.
        place = f"to + {one.width} * lane"
        where = f"<{one.width}, {one.to * itemsize}, {one.start * itemsize}, {'true' if one.once else 'false'}>"
        lines.append(f"  {guard}queue.copy{where}({place}, {one.source}, {one.exists});")
    return Fetch(tuple(declarations), tuple(rows), (*lines, "}"), name)
