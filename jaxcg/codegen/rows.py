"""Rows of z and of x gradients: how a role reads, writes, and adds to them."""

from dataclasses import dataclass

from jaxcg._coupling import Path
from jaxcg.codegen.context import RoleContext
from jaxcg.codegen.ir import Value
from jaxcg.codegen.problem import RoleLayout, indent
from jaxcg.codegen.stages import Stage
from jaxcg.schedule.shared import x_copy_bytes, z_copy_bytes

ZTable = tuple[tuple[int, int, Value], ...]


def _z_blocks(layout: RoleLayout, table: ZTable) -> list[tuple[Path, list[str]]]:
    """For each path of the role, the values of all components of its block of z."""
    names = {(n, k): value.name for n, k, value in table}
    return [(path, [names[n, k] for k in range(2 * path.l3 + 1)]) for n, path in enumerate(layout.paths)]


def _run(layout: RoleLayout, components: int) -> str:
    """Elements of this warp's slice of a block in layout mul_ir, where it is one run in memory."""
    if layout.full:
        return str(layout.slice * components)
    return f"(left + lane < {layout.slice} ? left + lane : {layout.slice}) * {components}"


def write_z(layout: RoleLayout, target: str, table: ZTable, zero: bool = False) -> list[str]:
    """Text that stores the accumulators of a role, or zeros, to a z row.

    In layout mul_ir by way of shared memory: lanes hold channels, memory wants components. Stored as they are, each
    component of a block would touch every sector of it.
    """
    coupling, itemsize = layout.problem.coupling, layout.problem.number.itemsize
    if coupling.layout == "ir_mul":
        nothing = f"zeros<T, {layout.channels}>()"
        blocks = [(path, [nothing] * len(names) if zero else names) for path, names in _z_blocks(layout, table)]
        moves = [layout.move("store", "Global", f"{target} + {path.out_offset}", names) for path, names in blocks]
        return [line for move in moves for line in move]
    lines: list[str] = []
    for path, names in _z_blocks(layout, table):
        components = len(names)
        width = z_copy_bytes(coupling, path, itemsize) // itemsize
        start = f"{target} + {path.out_offset} + {layout.slice * components} * chunk"
        if zero:
            lines.append(f"zero_run<{width}>({start}, {_run(layout, components)}, lane);")
            continue
        if lines:
            lines.append("__syncwarp();  // all lanes are done with the path before")
        lines += layout.move("store", "Shared", "transit", names)
        lines += ["__syncwarp();", f"move_run<true, {width}>({start}, transit, {_run(layout, components)}, lane);"]
    if not zero and (layout.problem.outputs("y") or len(layout.problem.outputs("z")) > 1):
        lines.append("__syncwarp();  // the next row of z, or sums of y gradients, take the same way")
    return lines


@dataclass(frozen=True)
class ReceiverText:
    """Text around the rows of receivers.

    Attributes:
        functions: before the loop: `flush()` writes the row of the receiver that ends, `clear(n)` zeros to row n.
        change: for a change of receiver.
        last: after the loop.
        load: loads the z operands of `row`.
    """

    functions: list[str]
    change: list[str]
    last: list[str]
    load: list[str]


def render_receivers(context: RoleContext) -> ReceiverText:
    """Text for a change of receiver, for writing the last one, and for a row without graph."""
    problem, layout, dim = context.problem, context.layout, context.problem.coupling.dim_out
    load: list[str] = []
    for operand, table in context.lowered.z_operands:
        load.append(f"const T* const from{operand} = {problem.operand(operand)} + row * {dim}ll;")
        for path, names in _z_blocks(layout, table):
            load += layout.move("load", "Global", f"from{operand} + {path.out_offset}", names)
    change = ["if (changes & 1u) {", "  const int receiver = __shfl_sync(0xffffffffu, my_receiver, b);"]
    if not context.lowered.z_outputs or not problem.indexed:
        return ReceiverText([], [*change, "  row = receiver;", *indent(load), "}"], [], load)
    accumulators = [value for _, table in context.lowered.z_outputs for _, _, value in table]
    accumulators += context.lowered.lost
    flush, clear = ["const auto flush = [&]() {"], ["const auto clear = [&](int n) {"]
    for order, (output, table) in enumerate(context.lowered.z_outputs):
        scratch = f"static_cast<T*>({problem.extra(0)}) + ({order} * args.sizes[3] + piece) * {dim}ll"
        flush.append(f"  T* const to{output} = continued ? {scratch} : {problem.output(output)} + row * {dim}ll;")
        flush += indent(write_z(layout, f"to{output}", table))
        clear.append(f"  T* const to{output} = {problem.output(output)} + n * {dim}ll;")
        clear += indent(write_z(layout, f"to{output}", table, zero=True))
    change += [
        "  if (row >= 0) flush(), continued = false;",
        "  for (int n = written + 1; n < receiver; ++n) clear(n);",
        "  written = receiver;",
        *(f"  {value.name} = zeros<T, {layout.channels}>();" for value in accumulators),
        "  row = receiver;",
        *indent(load),
        "}",
    ]
    last = [
        # The last edge may have written a row just now.
        *(["__syncwarp();"] if context.transit_size else []),
        # A piece without edges in the middle of a receiver adds nothing to it, but its scratch is read.
        "if (row >= 0 || continued) flush();",
        # Rows before the first receiver and after the last are shared out, for they may be many: padding.
        "const int rows = static_cast<int>(args.sizes[2]);",
        # Without edges all rows lie outside.
        f"const int before = edges > 0 ? {problem.receiver('0')} : rows;",
        # Receivers that are not sorted, against the promise, must not lead out of bounds.
        f"const int after = edges > 0 ? {problem.receiver('edges - 1')} + 1 : rows;",
        "const int beyond = after < before ? before : after;",
        "const long long outside = static_cast<long long>(before) + rows - beyond;",
        "const int from = static_cast<int>(outside * piece / pieces);",
        "const int to = static_cast<int>(outside * (piece + 1) / pieces);",
        "for (int n = from; n < to; ++n) clear(n < before ? n : n - before + beyond);",
    ]
    return ReceiverText([*flush, "};", *clear, "};"], change, last, load)


def write_x_gradients(context: RoleContext, stage: Stage) -> list[str]:
    """Text that adds the x gradients of an edge to the row of its sender."""
    problem, layout = context.problem, context.layout
    block = 2 * layout.paths[0].l1 + 1
    lines: list[str] = []
    for order, output in enumerate(problem.outputs("x")):
        row = f"{problem.output(output)} + sender * {problem.coupling.dim_in1}ll"
        lines.append(f"T* const gx{output} = {row};")
        names = [f"gx{output}_i{i}" for i in range(block)]
        offset = layout.paths[0].in1_offset
        if problem.coupling.layout == "mul_ir":
            # Through shared memory, where the slice is one run: lanes hold channels, memory wants components.
            if order:
                lines.append("__syncwarp();")
            place = f"stage + {stage.gradient}"
            lines += layout.move("store", "Shared", place, names)
            width = x_copy_bytes(problem.coupling, layout.paths[0], problem.number.itemsize) // problem.number.itemsize
            start = f"gx{output} + {offset} + {layout.slice * block} * chunk"
            exclusive = "true" if context.exclusive else "false"
            where = f"{start}, {place}, {_run(layout, block)}, lane"
            lines += ["__syncwarp();", f"move_run<{exclusive}, {width}>({where});"]
            continue
        if context.exclusive:
            lines += layout.move("store", "Global", f"gx{output} + {offset}", names)
            continue
        for i, name in enumerate(names):
            to = f"gx{output} + {offset + i * layout.mul} + u"
            if layout.packed:
                lines.append(f"add_atomically<{layout.channels}>({to}, {name}.v);")
                continue
            for t in range(layout.channels):
                test = "" if layout.full else f"if ({32 * t} < left) "
                lines.append(f"{test}add_atomically<1>({to} + {32 * t}, {name}.v + {t});")
    return lines
