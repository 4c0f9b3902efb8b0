"""Rows of z and of x gradients: how a role reads, writes, and adds to them."""

from dataclasses import dataclass

from jaxcg.codegen.context import RoleContext
from jaxcg.codegen.ir import Value
from jaxcg.codegen.problem import RoleLayout, indent
from jaxcg.codegen.stages import Stage
from jaxcg.schedule.shared import x_copy_bytes, z_copy_bytes

ZTable = tuple[tuple[int, int, Value], ...]


def _z_moves(layout: RoleLayout, table: ZTable) -> list[tuple[str, int, str]]:
    """(offset, step, value name) for each component of a z row of this role."""
    moves: list[tuple[str, int, str]] = []
    for n, k, value in table:
        path = layout.paths[n]
        components = 2 * path.l3 + 1
        moves.append((layout.offset(path.out_offset, components, k), layout.step(components), value.name))
    return moves


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
        return [
            f"Global::store({target} + {offset}, {step}, left, {nothing if zero else name});"
            for offset, step, name in _z_moves(layout, table)
        ]
    lines: list[str] = []
    for n, path in enumerate(layout.paths):
        components = 2 * path.l3 + 1
        width = z_copy_bytes(coupling, path, itemsize) // itemsize
        start = f"{target} + {path.out_offset} + {layout.slice * components} * chunk"
        if zero:
            lines.append(f"zero_run<{width}>({start}, {_run(layout, components)}, lane);")
            continue
        if lines:
            lines.append("__syncwarp();  // all lanes are done with the path before")
        for path_number, k, value in table:
            if path_number == n:
                place = f"transit + {layout.shared_offset(components, k)}"
                lines.append(f"Shared::store({place}, {32 * components}, left, {value.name});")
        lines += ["__syncwarp();", f"move_run<true, {width}>({start}, transit, {_run(layout, components)}, lane);"]
    if layout.problem.outputs("y") and not zero:
        lines.append("__syncwarp();  // sums of y gradients take the same way")
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
        load += [
            f"{name} = Global::load(from{operand} + {offset}, {step}, left);"
            for offset, step, name in _z_moves(layout, table)
        ]
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
        if problem.coupling.layout == "mul_ir":
            # Through shared memory, where the slice is one run: lanes hold channels, memory wants components.
            if order:
                lines.append("__syncwarp();")
            place = f"stage + {stage.gradient}"
            for i in range(block):
                to = f"{place} + {layout.shared_offset(block, i)}"
                lines.append(f"Shared::store({to}, {32 * block}, left, gx{output}_i{i});")
            width = x_copy_bytes(problem.coupling, layout.paths[0], problem.number.itemsize) // problem.number.itemsize
            start = f"gx{output} + {layout.paths[0].in1_offset} + {layout.slice * block} * chunk"
            exclusive = "true" if context.exclusive else "false"
            lines += [
                "__syncwarp();",
                f"move_run<{exclusive}, {width}>({start}, {place}, {_run(layout, block)}, lane);",
            ]
            continue
        for i in range(block):
            to = f"gx{output} + {layout.offset(layout.paths[0].in1_offset, block, i)}"
            value = f"gx{output}_i{i}"
            if context.exclusive:
                lines.append(f"Global::store({to}, {layout.step(block)}, left, {value});")
            elif layout.packed:
                lines.append(f"add_atomically<{layout.channels}>({to}, {value}.v);")
            else:
                for t in range(layout.channels):
                    test = "" if layout.full else f"if ({32 * t} < left) "
                    lines.append(f"{test}add_atomically<1>({to} + {32 * t}, {value}.v + {t});")
    return lines
