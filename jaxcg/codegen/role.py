"""The function of a role: everything that one of its warps does with the edges of its block."""

from dataclasses import dataclass

from jaxcg.codegen.ir import Value
from jaxcg.codegen.lower import LoweredRole
from jaxcg.codegen.problem import Problem, RoleLayout, indent
from jaxcg.codegen.render import Addresses, declare, render_combination, render_program
from jaxcg.codegen.stages import Stage, lay_out, render_fetch
from jaxcg.codegen.sums import render_lane_sums, render_places
from jaxcg.schedule import Launch
from jaxcg.schedule.shared import table_stride

_ZTable = tuple[tuple[int, int, Value], ...]


@dataclass(frozen=True)
class RoleContext:
    """A role within its launch.

    Attributes:
        problem: what is computed.
        launch: the kernel.
        lowered: the role.
        number: of the role in the block.
        name: of its function.
        table: place of M in shared memory.
        sums: place of the y partial sums.
        ring: place of the first warp's stages.
        stage_size: elements of a stage.
        first_warp: number of its first warp in the block.
        sum_name: function that sums y gradients over the block; None if there are none.
        exclusive: whether nobody else writes its rows of x gradients, so that plain stores do.
    """

    problem: Problem
    launch: Launch
    lowered: LoweredRole
    number: int
    name: str
    table: int
    sums: int
    ring: int
    stage_size: int
    first_warp: int
    sum_name: str | None
    exclusive: bool

    @property
    def layout(self) -> RoleLayout:
        return RoleLayout(self.problem, self.lowered.role, self.lowered.paths)

    @property
    def barrier(self) -> str:
        """Where the warps of the role meet."""
        return f"role_barrier({self.number}, {32 * self.lowered.role.chunks});"

    @property
    def own_warp(self) -> str:
        """Number of this warp in the block."""
        shift = self.first_warp - self.lowered.role.chunk_start
        return f"(chunk + {shift})" if shift >= 0 else f"(chunk - {-shift})"


def _z_moves(layout: RoleLayout, table: _ZTable) -> list[tuple[str, int, str]]:
    """(offset, step, value name) for each component of a z row of this role."""
    moves: list[tuple[str, int, str]] = []
    for n, k, value in table:
        path = layout.paths[n]
        components = 2 * path.l3 + 1
        moves.append((layout.offset(path.out_offset, components, k), layout.step(components), value.name))
    return moves


def _write_z(layout: RoleLayout, target: str, table: _ZTable, zero: bool = False) -> list[str]:
    nothing = f"zeros<T, {layout.channels}>()"
    return [
        f"{layout.access}::store({target} + {offset}, {step}, left, {nothing if zero else name});"
        for offset, step, name in _z_moves(layout, table)
    ]


def _make_table(context: RoleContext) -> list[str]:
    """Text that makes the M row of lane b's edge: its quads are shared out over the warps of the role."""
    problem, role = context.problem, context.lowered.role
    stride = table_stride(problem.coupling, role)
    entries = context.lowered.entries
    quads = [entries[at : at + 4] for at in range(0, len(entries), 4)]
    lines: list[str] = []
    for order, operand in enumerate(problem.operands("y")):
        place = context.table + order * context.launch.batch * stride
        lines += [
            f"const T* const y{operand} = {problem.operand(operand)} + my_edge * {problem.coupling.dim_in2};",
            f"T* const row{operand} = reinterpret_cast<T*>(shared_memory) + {place} + lane * {stride};",
        ]
        for share in range(min(role.chunks, len(quads))):
            if role.chunks > 1:
                lines.append(f"if (chunk == {role.chunk_start + share}) {{")
            for q in range(share, len(quads), role.chunks):
                values = [
                    "T(0)"
                    if entry is None
                    else render_combination(entry.column, problem.number, lambda j, o=operand: f"__ldg(y{o} + {j})")
                    for entry in quads[q]
                ]
                lines.append(f"  store_quad(row{operand} + {4 * q}, {', '.join(values)});")
            if role.chunks > 1:
                lines.append("}")
    return lines


def _receivers(context: RoleContext) -> tuple[list[str], list[str], list[str]]:
    """Text for a change of receiver, for writing the last one, and for a row without graph."""
    problem, layout, dim = context.problem, context.layout, context.problem.coupling.dim_out
    flush: list[str] = []
    for order, (output, table) in enumerate(context.lowered.z_outputs):
        scratch = f"static_cast<T*>({problem.extra(0)}) + ({order} * args.sizes[3] + blockIdx.x) * {dim}ll"
        flush.append(f"T* const to{output} = continued ? {scratch} : {problem.output(output)} + row * {dim}ll;")
        flush += _write_z(layout, f"to{output}", table)
    load: list[str] = []
    for operand, table in context.lowered.z_operands:
        load.append(f"const T* const from{operand} = {problem.operand(operand)} + row * {dim}ll;")
        load += [
            f"{name} = {layout.access}::load(from{operand} + {offset}, {step}, left);"
            for offset, step, name in _z_moves(layout, table)
        ]

    def zero_rows(start: str, end: str) -> list[str]:
        lines = [f"for (long long empty = {start}; empty < {end}; ++empty) {{"]
        for output, table in context.lowered.z_outputs:
            lines.append(f"  T* const to{output} = {problem.output(output)} + empty * {dim}ll;")
            lines += indent(_write_z(layout, f"to{output}", table, zero=True))
        return [*lines, "}"]

    change = ["if (receiver != row) {"]
    last: list[str] = []
    if flush:
        change += ["  if (row >= 0) {", *indent(flush, 2), "  }"]
        change += indent(zero_rows("(row >= 0 ? row : before) + 1", "receiver"))
        change.append("  continued = row < 0 && before == receiver;")
        change += [
            f"  {value.name} = zeros<T, {layout.channels}>();"
            for _, table in context.lowered.z_outputs
            for _, _, value in table
        ]
        last = [*flush, "if (last == args.sizes[0]) {", *indent(zero_rows("row + 1", "args.sizes[2]")), "}"]
    return [*change, "  row = receiver;", *indent(load), "}"], last, load


def _write_x_gradients(context: RoleContext, stage: Stage) -> list[str]:
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
                lines.append(f"{layout.shared_access}::store({to}, {32 * block}, left, gx{output}_i{i});")
            count = str(layout.slice * block)
            if not layout.full:
                count = f"(left + lane < {layout.slice} ? left + lane : {layout.slice}) * {block}"
            coupling = problem.coupling
            width = 4 if all(v % 4 == 0 for v in (coupling.dim_in1, layout.paths[0].in1_offset, layout.mul)) else 1
            width = min(width, 16 // problem.number.itemsize)
            start = f"gx{output} + {layout.paths[0].in1_offset} + {layout.slice * block} * chunk"
            exclusive = "true" if context.exclusive else "false"
            lines += ["__syncwarp();", f"move_run<{exclusive}, {width}>({start}, {place}, {count}, lane);"]
            continue
        for i in range(block):
            to = f"gx{output} + {layout.offset(layout.paths[0].in1_offset, block, i)}"
            value = f"gx{output}_i{i}"
            if context.exclusive:
                lines.append(f"{layout.access}::store({to}, {layout.step(block)}, left, {value});")
            elif layout.packed:
                lines.append(f"add_atomically<{layout.channels}>({to}, {value}.v);")
            else:
                for t in range(layout.channels):
                    test = "" if layout.full else f"if ({32 * t} < left) "
                    lines.append(f"{test}add_atomically<1>({to} + {32 * t}, {value}.v + {t});")
    return lines


def render_role(context: RoleContext) -> list[str]:
    """The functions of a role: the copies of an edge, and the walk over the block's edges."""
    problem, layout, lowered, launch = context.problem, context.layout, context.lowered, context.launch
    coupling, indexed = problem.coupling, problem.indexed
    stage = lay_out(layout, context.stage_size)
    ahead = launch.stages - 1
    batch, channels = launch.batch, layout.channels
    fetch_name = f"{context.name}_fetch"
    has_shared = bool(problem.operands("y") or problem.outputs("y"))
    change, last, load_row = _receivers(context)
    accumulators = [value for _, table in lowered.z_outputs for _, _, value in table]
    held = [value for _, table in lowered.z_operands for _, _, value in table]

    text = render_fetch(layout, stage, fetch_name) if stage.size else []
    body = [
        f"const int u = {layout.first_channel()};",
        f"const int left = {layout.mul} - u;",
        "(void)left;",
    ]
    if indexed:
        before = f"{problem.index('receivers')}[{problem.edge_at('first - 1')}]"
        body += declare(accumulators + held, channels, zero=True)
        body += [
            f"const long long before = first > 0 ? {before} : -1;",
            "long long row = -1;",
            "bool continued = false;",
            "(void)before, (void)continued;",
        ]
    body += render_places(lowered) if problem.outputs("y") else []
    # Lane t holds the indices of the t-th edge of the batch, and those of the batch after it for the copies ahead.
    body += [
        "long long position = first + lane < last ? first + lane : last - 1;",
        f"long long next_edge = {problem.edge_at('position')};",
        "long long my_edge;",
    ]
    if indexed:
        body += [
            f"int next_sender = {problem.index('senders')}[next_edge];",
            f"int next_receiver = {problem.index('receivers')}[next_edge];",
            "int my_sender, my_receiver;",
        ]
    if stage.size:
        place = f"{context.ring} + (chunk - {lowered.role.chunk_start}) * {launch.stages * stage.size}"
        body += [
            "CopyQueue queue;",
            f"T* const ring = reinterpret_cast<T*>(shared_memory) + {place};",
            "int slot = 0;",
            "#pragma unroll 1",
            f"for (int t = 0; t < {ahead}; ++t) {{",
            *indent(_fetch_ahead(problem, fetch_name, "first + t", "t", f"ring + t * {stage.size}", 0)),
            "  queue.commit();",
            "}",
        ]
    body += [
        f"for (long long base = first; base < last; base += {batch}) {{",
        f"  const int count = last - base < {batch} ? static_cast<int>(last - base) : {batch};",
        "  my_edge = next_edge;",
        *(["  my_sender = next_sender, my_receiver = next_receiver;"] if indexed else []),
        f"  position = base + {batch} + lane < last ? base + {batch} + lane : last - 1;",
        f"  next_edge = {problem.edge_at('position')};",
    ]
    if indexed:
        body += [
            f"  next_sender = {problem.index('senders')}[next_edge];",
            f"  next_receiver = {problem.index('receivers')}[next_edge];",
        ]
    if context.sum_name is not None:
        body.append("  block_barrier();  // the block is done with the sums of the last batch")
    elif has_shared:
        body.append(f"  {context.barrier}  // the role is done with M of the last batch")
    if problem.operands("y"):
        body += ["  if (lane < count) {", *indent(_make_table(context), 2), "  }"]
        body.append(f"  {context.barrier}  // M is complete")
    body += ["#pragma unroll 1", "  for (int b = 0; b < count; ++b) {"]

    edge: list[str] = []
    if stage.size:
        # The barrier of the warp ends two waits at once: all lanes' copies of this edge are there, and all lanes
        # are done with the stage that the next copies go to.
        edge += [
            f"queue.wait<{ahead - 1}>();",
            "__syncwarp();",
            f"T* const stage = ring + slot * {stage.size};",
            f"T* const free = ring + (slot == 0 ? {ahead} : slot - 1) * {stage.size};",
            f"slot = slot == {ahead} ? 0 : slot + 1;",
            *_fetch_ahead(problem, fetch_name, f"base + b + {ahead}", f"b + {ahead}", "free", batch),
            "queue.commit();",
        ]
    edge.append(
        "const long long edge = __shfl_sync(0xffffffffu, static_cast<int>(my_edge), b);"
        if problem.ordered
        else "const long long edge = base + b;"
    )
    edge.append("(void)edge;")
    gradients_w = {n: f"{problem.output(n)} + edge * {coupling.weight_numel}ll + u" for n in problem.outputs("w")}
    edge += [f"T* const gw{n} = {pointer};" for n, pointer in gradients_w.items()]
    at = Addresses(
        w=lambda o, n: f"{layout.shared_access}::load(stage + {stage.w[o] + n * layout.slice} + w_lane, 32, left)",
        m=lambda o: f"m{o}",
        gw=lambda o, n, value: f"{layout.access}::store(gw{o} + {layout.paths[n].weight_offset}, 32, left, {value})",
    )
    if indexed:
        edge += [
            "const int sender = __shfl_sync(0xffffffffu, my_sender, b);",
            "const int receiver = __shfl_sync(0xffffffffu, my_receiver, b);",
            *change,
            "if (sender < 0) {  // an absent edge: its gradients are 0, whatever its operands hold",
            *(
                f"  {at.gw(n, p, f'zeros<T, {channels}>()')};"
                for n in problem.outputs("w")
                for p in range(len(layout.paths))
            ),
            "  continue;",
            "}",
        ]
    else:
        edge += ["const long long sender = edge, row = edge;", "(void)sender;"]
        edge += declare(accumulators, channels, zero=True) + declare(held, channels, zero=False) + load_row
    if problem.operands("w"):
        edge.append(f"const int w_lane = {f'{channels} * lane' if layout.packed else 'lane'};")
    block = 2 * layout.paths[0].l1 + 1
    for n, place in stage.x.items():
        step = 32 if coupling.layout == "ir_mul" else 32 * block
        edge += [
            f"const {layout.lanes} x{n}_i{i} = {layout.shared_access}::load(stage + {place} + "
            f"{layout.shared_offset(block, i)}, {step}, left);"
            for i in range(block)
        ]
    stride = table_stride(coupling, lowered.role)
    for order, n in enumerate(problem.operands("y")):
        place = f"{context.table + order * batch * stride} + b * {stride}"
        edge += [f"const T* const m{n} = reinterpret_cast<const T*>(shared_memory) + {place};", f"(void)m{n};"]
    edge += declare([v for v in lowered.program.inputs if v.name.startswith(("gx", "gy"))], channels, zero=True)
    edge += render_program(lowered, lowered.program, problem.number, at)
    edge += _write_x_gradients(context, stage)
    if not indexed:
        for output, table in lowered.z_outputs:
            edge.append(f"T* const to{output} = {problem.output(output)} + row * {coupling.dim_out}ll;")
            edge += _write_z(layout, f"to{output}", table)
    for order, sums in enumerate(lowered.program.y_sums):
        edge += render_lane_sums(problem, launch, lowered, order, sums, context.sums, context.own_warp)
    body += [*indent(edge, 2), "  }"]
    if context.sum_name is not None:
        body.append("  block_barrier();  // all partial sums of y gradients are there")
        body.append(f"  {context.sum_name}(args, shared_memory, base, count);")
    body += ["}", *(last if indexed else [])]
    head = (
        f"__device__ __forceinline__ void {context.name}(const Args& args, unsigned char* shared_memory, int lane, "
        "int chunk, long long first, long long last) {"
    )
    return [*text, head, *indent(body), "}"]


def _fetch_ahead(problem: Problem, fetch: str, position: str, place: str, stage: str, batch: int) -> list[str]:
    """Start the copies of the edge at a position, if it is in the block's range.

    Its indices are at `place` of this batch, or beyond it in the next; `batch` 0: always in the next.
    """
    from_lane = f"({place}) % {batch}" if batch else place

    def held(name: str) -> str:
        return f"{place} < {batch} ? my_{name} : next_{name}" if batch else f"next_{name}"

    lines = [f"if ({position} < last) {{"]
    if problem.ordered:
        lines.append(
            f"  const long long edge = __shfl_sync(0xffffffffu, static_cast<int>({held('edge')}), {from_lane});"
        )
    else:
        lines.append(f"  const long long edge = {position};")
    if problem.indexed:
        lines.append(f"  const int sender = __shfl_sync(0xffffffffu, {held('sender')}, {from_lane});")
        lines.append(f"  {fetch}(args, queue, {stage}, edge, sender < 0 ? 0 : sender, lane, chunk);")
    else:
        lines.append(f"  {fetch}(args, queue, {stage}, edge, edge, lane, chunk);")
    return [*lines, "}"]
