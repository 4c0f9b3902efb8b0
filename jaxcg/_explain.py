"""`TensorProduct.explain`: the paths of a product as a table, with what they cost and what runs them, and how."""

from math import prod

from ._coupling import Path, couple
from ._problem import TensorProduct
from ._support import path_obstacle
from ._terms import orders

_HEADER = ("path", "in1", "in2", "out", "mode", "nonzeros", "weights", "runs on")
_NUMBERS = (0, 5, 6)  # right-aligned columns


def path_flops(path: Path) -> int:
    """Floating-point operations of a path for one row.

    A multiply and an add for each nonzero and each pair of channels that the mode couples, then a multiply and an add
    for each weight and component of the result.
    """
    pairs = path.mul1 if path.mode in ("uuw", "uuu") else path.mul1 * path.mul2
    weighted = 0 if path.weight_offset is None else prod(path.weight_shape) * (2 * path.l3 + 1)
    return 2 * (pairs * len(path.entries) + weighted)


def row_flops(tp: TensorProduct) -> int:
    """Floating-point operations of one row of the product, path by path and nothing shared between paths."""
    return sum(map(path_flops, couple(tp).paths))


def row_bytes(tp: TensorProduct, itemsize: int) -> int:
    """Bytes that one row must move: every operand read once, the result written once."""
    return itemsize * (tp.irreps_in1.dim + tp.irreps_in2.dim + tp.weight_numel + tp.irreps_out.dim)


def explain(tp: TensorProduct) -> str:
    """The text of `TensorProduct.explain`."""
    support = tp.kernel_support()
    coupled = {path.index: path for path in couple(tp).paths}
    active = tp.active_instructions()
    rows: list[tuple[str, ...]] = []
    for number, (i1, i2, i_out, mode, has_weight, _) in enumerate(tp.instructions):
        path = coupled.get(number)
        if path is None:
            runs_on = "nothing: " + ("path weight 0" if number in active else "multiplicity 0")
        elif support.ok:
            runs_on = "cuda kernel (plain product only)" if support.swapped else "cuda kernel"
        else:
            obstacle = path_obstacle(tp, number)
            runs_on = f"xla ({obstacle})" if obstacle else "xla"
        rows.append(
            (
                str(number),
                str(tp.irreps_in1[i1]),
                str(tp.irreps_in2[i2]),
                str(tp.irreps_out[i_out]),
                mode,
                str(len(path.entries) if path else 0),
                str(prod(tp.weight_shape(number)) if has_weight else 0),
                runs_on,
            )
        )
    title = (
        f"{tp.irreps_in1} x {tp.irreps_in2} -> {tp.irreps_out.simplify()}: {_count(len(rows), 'path')}, "
        f"{tp.weight_numel} weights, layout {tp.layout}"
    )
    where = "cuda kernel on a CUDA device, xla elsewhere" if support.ok else "xla"
    footer = [
        f'impl="auto": {where} ({support.reason})',
        f"per row: {row_flops(tp)} floating-point operations, at least {row_bytes(tp, 4)} bytes in float32 and "
        f"{row_bytes(tp, 8)} in float64 (each operand read once, the result written once)",
    ]
    return "\n".join([title, *_table(rows), *footer, *_schedules(tp)])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _schedules(tp: TensorProduct) -> list[str]:
    """How the kernels of a convolution are laid out on one H200, and why."""
    from ._primitive import resolve
    from .schedule import H200, choose
    from .schedule.cost import STREAM_BYTES_A_CYCLE, nanoseconds

    support = tp.kernel_support()
    if not support.ok or support.swapped:
        return []
    weighted = any(path.weight_offset is not None for path in couple(tp).paths)
    coupling = resolve(tp, True, False, "streamed" if weighted else "none")
    if not coupling.paths:
        return []
    lines = [
        "kernels of the convolution on one H200, expected time for each edge (floor: y and w once, at a copy's rate):"
    ]
    for itemsize, dtype in ((4, "float32"), (8, "float64")):
        for order, terms in orders(weighted).items():
            schedule = choose(coupling, terms, itemsize, H200)
            slots = (*terms.operands, *(out.slot for out in terms.outputs))
            moved = slots.count("w") * coupling.weight_numel + slots.count("y") * coupling.dim_in2
            floor = nanoseconds(moved * itemsize / STREAM_BYTES_A_CYCLE)
            time = nanoseconds(sum(launch.time.total for launch in schedule.launches))
            count = len(schedule.launches)
            lines.append(
                f"{dtype} {order.replace('_', ' ')}: {time:.2f} ns, floor {floor:.2f} ns ({100 * floor / time:.0f} %), "
                f"{count} launch{'' if count == 1 else 'es'}"
            )
            for launch in schedule.launches:
                roles = ", ".join(
                    f"l={coupling.paths[role.paths[0]].l1} ({_count(len(role.paths), 'path')}, "
                    f"{_count(role.channels, 'channel')} a lane)"
                    for role in launch.roles
                )
                limit = "memory" if launch.time.memory > launch.time.issue else "instructions"
                lines.append(
                    f"  {nanoseconds(launch.time.total):.2f} ns, limited by {limit}: {launch.warps} warps of "
                    f"{launch.registers} registers, {launch.stages} stages; {roles}"
                )
    return lines


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    lines = [_HEADER, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]

    def render(line: tuple[str, ...]) -> str:
        cells = (
            cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return [render(line) for line in lines]
