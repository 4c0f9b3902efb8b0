"""The function of a role: everything that one of its warps does with the edges of its piece."""

from dataclasses import dataclass

from jaxcg.codegen.ir import Value
from jaxcg.codegen.lower import LoweredRole
from jaxcg.codegen.problem import Problem, RoleLayout, indent
from jaxcg.codegen.render import Addresses, declare, render_combination, render_program
from jaxcg.codegen.stages import Fetch, Stage, lay_out, plan_fetch
from jaxcg.codegen.sums import render_lane_sums, render_places
from jaxcg.schedule import SHARE, Launch
from jaxcg.schedule.shared import table_stride

# A piece has at least this many edges on average. Fewer, and its start and the fix-up of its first receiver dominate; and
# scratch, a row of z for each piece, would be larger than the weights of a small graph.
PIECE_EDGES = 16
MOST_STAGES = 12

_ZTable = tuple[tuple[int, int, Value], ...]


@dataclass(frozen=True)
class RoleContext:
    """A role within its launch.

    Attributes:
        problem: what is computed.
        launch: the kernel.
        lowered: the role.
        name: of its function.
        table: place of the first team's M in shared memory.
        table_size: elements of the M of a team.
        sums: place where the first warp sums over its lanes.
        sum_size: elements of such a place.
        ring: place of the first warp's stages.
        ring_size: elements of a ring.
        stage_size: elements of a stage.
        follows: whether its team may have done another role before.
        first_barrier: number of the first team's barrier.
        first_share: number of the first chunk's share of y gradients.
        region: number of its marks of continued receivers.
        max_pieces: most pieces of a role.
        exclusive: whether nobody else writes its rows of x gradients, so that plain stores do.
    """

    problem: Problem
    launch: Launch
    lowered: LoweredRole
    name: str
    table: int
    table_size: int
    sums: int
    sum_size: int
    ring: int
    ring_size: int
    stage_size: int
    follows: bool
    first_barrier: int
    first_share: int
    region: int
    max_pieces: int
    exclusive: bool

    @property
    def layout(self) -> RoleLayout:
        return RoleLayout(self.problem, self.lowered.role, self.lowered.paths)

    @property
    def stages(self) -> int:
        """Edges whose operands fit a ring, at most `MOST_STAGES`: a role with little work an edge needs many."""
        return min(MOST_STAGES, self.ring_size // self.stage_size) if self.stage_size else 0

    @property
    def barrier(self) -> str:
        """Where the warps of a team meet."""
        chunks = self.lowered.role.chunks
        if chunks == 1:
            return "__syncwarp();"
        return f"team_barrier({self.first_barrier} + team, {32 * chunks});"

    def shared(self, place: int, size: int, of_warp: bool) -> str:
        """Pointer to this team's or this warp's place in shared memory."""
        role = self.lowered.role
        number = "team"
        if of_warp and role.chunks > 1:
            chunk = "chunk" if role.chunk_start == 0 else f"(chunk - {role.chunk_start})"
            number = f"(team * {role.chunks} + {chunk})"
        return f"reinterpret_cast<T*>(shared_memory) + {place} + {number} * {size}"


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
        place = order * context.launch.batch * stride
        lines += [
            f"const T* const y{operand} = {problem.operand(operand)} + my_edge * {problem.coupling.dim_in2}ll;",
            f"T* const row{operand} = table + {place} + lane * {stride};",
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
        scratch = f"static_cast<T*>({problem.extra(0)}) + ({order} * args.sizes[3] + piece) * {dim}ll"
        flush.append(f"T* const to{output} = continued ? {scratch} : {problem.output(output)} + row * {dim}ll;")
        flush += _write_z(layout, f"to{output}", table)
    load: list[str] = []
    for operand, table in context.lowered.z_operands:
        load.append(f"const T* const from{operand} = {problem.operand(operand)} + row * {dim}ll;")
        load += [
            f"{name} = {layout.access}::load(from{operand} + {offset}, {step}, left);"
            for offset, step, name in _z_moves(layout, table)
        ]

    def receivers(place: str) -> str:
        return f"{problem.index('receivers')}[{problem.edge_at(place)}]"

    def zero_rows(start: str, end: str, row: str = "n") -> list[str]:
        lines = [f"for (int n = {start}; n < {end}; ++n) {{"]
        for output, table in context.lowered.z_outputs:
            lines.append(f"  T* const to{output} = {problem.output(output)} + ({row}) * {dim}ll;")
            lines += indent(_write_z(layout, f"to{output}", table, zero=True))
        return [*lines, "}"]

    change = ["if (changes & 1u) {", "  const int receiver = __shfl_sync(0xffffffffu, my_receiver, b);"]
    last: list[str] = []
    if flush:
        change += ["  if (row >= 0) {", *indent(flush, 2), "    continued = false;", "  }"]
        change += indent(zero_rows("written + 1", "receiver"))
        change += ["  written = receiver;"]
        change += [
            f"  {value.name} = zeros<T, {layout.channels}>();"
            for _, table in context.lowered.z_outputs
            for _, _, value in table
        ]
        # Rows before the first receiver and after the last are shared out, for they may be many: padding.
        last = [
            # A piece without edges in the middle of a receiver adds nothing to it, but its scratch is read.
            "if (row >= 0 || continued) {",
            *indent(flush),
            "}",
            "const int rows = static_cast<int>(args.sizes[2]);",
            # Without edges all rows lie outside.
            f"const int before = edges > 0 ? {receivers('0')} : rows;",
            f"const int beyond = edges > 0 ? {receivers('edges - 1')} + 1 : rows;",
            "const long long outside = before + rows - beyond;",
            "const int from = static_cast<int>(outside * piece / pieces);",
            "const int to = static_cast<int>(outside * (piece + 1) / pieces);",
            *zero_rows("from", "to", "n < before ? n : n - before + beyond"),
        ]
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


def _render_range(context: RoleContext) -> list[str]:
    """Text that finds the edges of the piece, and marks the receiver that a boundary cuts."""
    problem, role = context.problem, context.lowered.role
    first, share = role.first_team, role.end - role.start
    cut = f"{SHARE} * t - {role.start}"
    lines = [
        # 32 bits, where a number of rows fits, are half the registers.
        "const int edges = static_cast<int>(args.sizes[0]);",
        f"if (team < {first} || team >= {first + role.pieces}) return;",
        f"const int pieces = {role.pieces} * static_cast<int>(gridDim.x);",
        f"const int piece = {role.pieces} * static_cast<int>(blockIdx.x) + team - {first};",
        "const long long block_first = args.sizes[0] * blockIdx.x / gridDim.x;",
        "const long long block_edges = args.sizes[0] * (blockIdx.x + 1ll) / gridDim.x - block_first;",
        # Where the work of teams before t ends in that of the role, as an edge of the block.
        f"const auto boundary = [&](int t) {{ const int cut = {cut}; return static_cast<int>(block_first + block_edges * "
        f"(cut < 0 ? 0 : cut > {share} ? {share} : cut) / {share}); }};",
        f"{'int' if problem.has_scratch else 'const int'} first = boundary(team), last = boundary(team + 1);",
    ]
    if not problem.has_scratch:
        return lines
    receivers = problem.index("receivers")
    receiver = lambda place: f"{receivers}[{problem.edge_at(place)}]"  # noqa: E731
    reach = role.cost.reach
    if reach > 1:
        lines += [
            # A boundary that falls on the start of a row cuts no receiver, so it moves there if that is not far.
            f"const int reach = edges / pieces / 8 < {reach} ? edges / pieces / 8 : {reach};",
            f"const auto receiver_of = [&](int n) {{ return {receiver('n')}; }};",
            "first = near_row_start(receiver_of, first, edges, reach, lane);",
            "last = near_row_start(receiver_of, last, edges, reach, lane);",
        ]
    start = "" if role.chunks == 1 else f" && chunk == {role.chunk_start}"
    return [
        *lines,
        f"int written = first > 0 ? {receiver('first - 1')} : edges > 0 ? {receiver('0')} - 1 : -1;",
        # An empty piece continues what the one after it continues, so that it does not end the chain.
        f"bool continued = first > 0 && first < edges && written == {receiver('first')};",
        f"if (lane == 0{start}) {{",
        f"  int* const marks = static_cast<int*>({problem.extra(1)}) + {context.region * (context.max_pieces + 1)};",
        "  marks[1 + piece] = continued ? written : -1;",
        "  if (piece == 0) marks[0] = pieces;",
        "}",
    ]


def _fetch_ahead(context: RoleContext, fetch: Fetch, position: str, lane: str, to: str) -> list[str]:
    """Start the copies of the edge at a position, if it is in the piece; `lane` holds its indices ahead."""
    problem = context.problem
    lines = [f"if ({position} < last) {{"]
    if problem.ordered:
        lines.append(f"  const int edge = __shfl_sync(0xffffffffu, ahead_edge, {lane});")
    else:
        lines.append(f"  const int edge = {position};")
    sender = "edge"
    if problem.indexed:
        sender = "sender"
        lines.append(f"  const int sender = __shfl_sync(0xffffffffu, ahead_sender, {lane});")
    return [*lines, f"  (void)edge, (void){sender};", f"  {fetch.call(to, 'edge', sender)}", "}"]


def _load_indices(problem: Problem, place: str, prefix: str, names: tuple[str, ...], declare: bool) -> list[str]:
    """Load what this lane holds of the edge at a position: `edge` is made whatever `names` has."""
    kind = "int " if declare else ""
    lines = [
        "{",
        f"  const int position = {place} < last ? {place} : last - 1;",
        f"  {prefix}_edge = {problem.edge_at('position')};",
    ]
    for name in names:
        value = f"{problem.index(name + 's')}[{prefix}_edge]"
        lines.append(f"  {prefix}_{name} = {value};")
        if prefix.startswith("later") and name == "sender":
            # An absent edge's operands are copied from row 0 and then ignored.
            lines.append(f"  {prefix}_sender = {prefix}_sender < 0 ? 0 : {prefix}_sender;")
    declared = [f"{kind}{prefix}_edge{''.join(f', {prefix}_{name}' for name in names)};"] if declare else []
    return [*declared, *lines, "}"]


def render_role(context: RoleContext) -> list[str]:
    """The functions of a role: the copies of an edge, and the walk over the edges of a piece."""
    problem, layout, lowered, launch = context.problem, context.layout, context.lowered, context.launch
    indexed, channels, batch = problem.indexed, layout.channels, launch.batch
    stage = lay_out(layout, context.stage_size)
    fetch = plan_fetch(layout, stage, f"{context.name}_fetch")
    change, last, load_row = _receivers(context)
    accumulators = [value for _, table in lowered.z_outputs for _, _, value in table]
    held = [value for _, table in lowered.z_operands for _, _, value in table]
    body = [
        *_render_range(context),
        *(["__syncwarp();  // all lanes are done with the role before, which used the same memory"] if context.follows else []),
        f"const int u = {layout.first_channel()};",
        f"const int left = {layout.mul} - u;",
        "(void)left;",
    ]
    if problem.operands("y"):
        body.append(f"T* const table = {context.shared(context.table, context.table_size, of_warp=False)};")
    if context.sum_size:
        body.append(f"T* const lane_sums = {context.shared(context.sums, context.sum_size, of_warp=True)};")
    if indexed:
        body += declare(accumulators + held, channels, zero=True)
        body.append("int row = -1;")
    body += render_places(lowered) if problem.outputs("y") else []
    # Lane t holds the indices of the t-th edge of the batch, and of the t-th of those that are copied meanwhile; of both
    # also those of the next batch, on their way.
    ahead = context.stages - 1
    mine, later = (("sender", "receiver"), ("sender",)) if indexed else ((), ())
    body += [
        *(["if (first < last) {"] if indexed else []),
        *_load_indices(problem, "first + lane", "next", mine, True),
    ]
    if stage.size:
        bytes_of_stage = stage.size * problem.number.itemsize
        body += [
            *_load_indices(problem, "first + lane", "later", later, True),
            "int ahead_edge = later_edge;",
            *(["int ahead_sender = later_sender;"] if indexed else []),
            "CopyQueue queue;",
            *fetch.declarations,
            f"T* const ring = {context.shared(context.ring, context.ring_size, of_warp=True)};",
            "const SharedAddress ring_address = shared_address(ring);",
            # Elements from the start of the ring: the stage of this edge, and the one before it, which is free then.
            f"int at = 0, free = {ahead * stage.size};",
            "#pragma unroll 1",
            f"for (int t = 0; t < {ahead}; ++t) {{",
            *indent(_fetch_ahead(context, fetch, "first + t", "t", f"ring_address + t * {bytes_of_stage}")),
            "  queue.commit();",
            "}",
            *_load_indices(problem, f"first + {ahead} + lane", "later", later, False),
        ]
    body += [
        f"for (int base = first; base < last; base += {batch}) {{",
        f"  const int count = last - base < {batch} ? last - base : {batch};",
        f"  const int my_edge = next_edge{', my_sender = next_sender, my_receiver = next_receiver' if indexed else ''};",
        "  (void)my_edge;",
        *indent(_load_indices(problem, f"base + {batch} + lane", "next", mine, False)),
    ]
    if stage.size:
        body += [
            "  ahead_edge = later_edge;",
            *(["  ahead_sender = later_sender;"] if indexed else []),
            *indent(_load_indices(problem, f"base + {batch + ahead} + lane", "later", later, False)),
        ]
    if indexed:
        body += [
            # Bit b: whether edge b is absent, and whether its receiver is another than that of the edge before.
            "  unsigned absent = __ballot_sync(0xffffffffu, my_sender < 0);",
            "  const int before = __shfl_up_sync(0xffffffffu, my_receiver, 1);",
            "  unsigned changes = __ballot_sync(0xffffffffu, my_receiver != (lane == 0 ? row : before));",
        ]
    if problem.operands("y"):
        body += [
            f"  {context.barrier}  // the team is done with M of the last batch",
            "  if (lane < count) {",
            *indent(_make_table(context), 2),
            "  }",
            # A team of one warp meets at each edge anyway.
            *([f"  {context.barrier}  // M is complete"] if lowered.role.chunks > 1 or not stage.size else []),
        ]
    body += ["#pragma unroll 1", "  for (int b = 0; b < count; ++b) {"]
    body += [*indent(_render_edge(context, stage, fetch, change, load_row), 2), "  }", "}"]
    body += ["}", *last] if indexed else []
    head = (
        f"__device__ __forceinline__ void {context.name}(const Args& args, unsigned char* shared_memory, int lane, "
        "int chunk, int team) {"
    )
    return [*(fetch.text if stage.size else ()), head, *indent(body), "}"]


def _render_edge(
    context: RoleContext, stage: Stage, fetch: Fetch, change: list[str], load_row: list[str]
) -> list[str]:
    """What a warp does with edge b of the batch."""
    problem, layout, lowered, launch = context.problem, context.layout, context.lowered, context.launch
    coupling, indexed, channels, ahead = problem.coupling, problem.indexed, layout.channels, context.stages - 1
    edge: list[str] = []
    if stage.size:
        # The barrier of the warp ends two waits at once: all lanes' copies of this edge are there, and all lanes
        # are done with the stage that the next copies go to.
        itemsize = problem.number.itemsize
        to = f"ring_address + {itemsize} * free"
        edge += [
            f"queue.wait<{ahead - 1}>();",
            "__syncwarp();",
            *_fetch_ahead(context, fetch, f"base + b + {ahead}", "b", to),
            "queue.commit();",
            "T* const stage = ring + at;",
            "free = at;",
            f"at = at == {ahead * stage.size} ? 0 : at + {stage.size};",
        ]
    elif context.sum_size:
        edge.append("__syncwarp();  // all lanes are done with the sums of the last edge")
    edge.append(
        "const int edge = __shfl_sync(0xffffffffu, my_edge, b);" if problem.ordered else "const int edge = base + b;"
    )
    edge.append("(void)edge;")
    gradients_w = {n: f"{problem.output(n)} + edge * {coupling.weight_numel}ll + u" for n in problem.outputs("w")}
    edge += [f"T* const gw{n} = {pointer};" for n, pointer in gradients_w.items()]
    shares = _share_rows(context)
    edge += [f"T* const share{order} = {row};" for order, row in enumerate(shares)]
    at = Addresses(
        w=lambda o, n: f"{layout.shared_access}::load(stage + {stage.w[o] + n * layout.slice} + w_lane, 32, left)",
        m=lambda o: f"m{o}",
        gw=lambda o, n, value: f"{layout.access}::store_once(gw{o} + {layout.paths[n].weight_offset}, 32, left, {value})",
    )
    if indexed:
        edge += [
            *change,
            "const bool is_absent = absent & 1u;",
            "changes >>= 1, absent >>= 1;",
            "if (is_absent) {  // its gradients are 0, whatever its operands hold",
            *(
                f"  {at.gw(n, p, f'zeros<T, {channels}>()')};"
                for n in problem.outputs("w")
                for p in range(len(layout.paths))
            ),
        ]
        if not problem.has_shares:
            for order in range(len(shares)):
                edge.append(f"  for (int j = lane; j < {coupling.dim_in2}; j += 32) share{order}[j] = T(0);")
        edge += ["  continue;", "}"]
        if problem.outputs("x"):
            edge.append("const int sender = __shfl_sync(0xffffffffu, my_sender, b);")
    else:
        edge += ["const int sender = edge, row = edge;", "(void)sender, (void)row;"]
        accumulators = [value for _, table in lowered.z_outputs for _, _, value in table]
        held = [value for _, table in lowered.z_operands for _, _, value in table]
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
        edge += [f"const T* const m{n} = table + {order * launch.batch * stride} + b * {stride};", f"(void)m{n};"]
    edge += declare([v for v in lowered.program.inputs if v.name.startswith(("gx", "gy"))], channels, zero=True)
    edge += render_program(lowered, lowered.program, problem.number, at)
    edge += _write_x_gradients(context, stage)
    if not indexed:
        for output, table in lowered.z_outputs:
            edge.append(f"T* const to{output} = {problem.output(output)} + row * {coupling.dim_out}ll;")
            edge += _write_z(layout, f"to{output}", table)
    for order, sums in enumerate(lowered.program.y_sums):
        edge += render_lane_sums(problem, lowered, order, sums, "lane_sums", f"share{order}")
        if not problem.has_shares and len(lowered.y_components) < coupling.dim_in2:
            # Nobody else writes the components that no path reads.
            missing = [j for j in range(coupling.dim_in2) if j not in lowered.y_components]
            test = " || ".join(f"j == {j}" for j in missing)
            edge.append(
                f"for (int j = lane; j < {coupling.dim_in2}; j += 32) if ({test}) share{order}[j] = T(0);"
            )
    return edge


def _share_rows(context: RoleContext) -> list[str]:
    """For each y output, the row of the edge that this warp writes."""
    problem, role = context.problem, context.lowered.role
    rows: list[str] = []
    for order, output in enumerate(problem.outputs("y")):
        if not problem.has_shares:
            rows.append(f"{problem.output(output)} + edge * {problem.coupling.dim_in2}ll")
            continue
        number = f"{order * problem.shares + context.first_share - role.chunk_start} + chunk"
        rows.append(problem.share(f"({number})", "edge"))
    return rows
