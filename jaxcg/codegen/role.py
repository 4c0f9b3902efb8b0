"""The function of a role: everything that one of its warps does with the edges of its piece."""

from jaxcg.codegen.context import RoleContext
from jaxcg.codegen.problem import Problem, indent
from jaxcg.codegen.render import Addresses, declare, render_combination, render_program
from jaxcg.codegen.rows import ReceiverText, render_receivers, write_x_gradients, write_z
from jaxcg.codegen.stages import Fetch, Stage, lay_out, plan_fetch
from jaxcg.codegen.sums import render_lane_sums, render_places
from jaxcg.schedule import SHARE
from jaxcg.schedule.shared import table_stride


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
        "const auto boundary = [&](int t) {",
        f"  const int cut = {cut}, within = cut < 0 ? 0 : cut > {share} ? {share} : cut;",
        f"  return static_cast<int>(block_first + block_edges * within / {share});",
        "};",
        f"{'int' if problem.has_scratch else 'const int'} first = boundary(team), last = boundary(team + 1);",
    ]
    if not problem.has_scratch:
        return lines
    receiver = problem.receiver
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
    lines = [
        "{",
        f"  const int position = {place} < last ? {place} : last - 1;",
        f"  {prefix}_edge = {problem.edge_at('position')};",
    ]
    for name in names:
        value = f"{name}s[{prefix}_edge]"
        lines.append(f"  {prefix}_{name} = {value};")
        if prefix.startswith("later") and name == "sender":
            # An absent edge's operands are copied from row 0 and then ignored.
            lines.append(f"  {prefix}_sender = {prefix}_sender < 0 ? 0 : {prefix}_sender;")
    declared = [f"int {prefix}_edge{''.join(f', {prefix}_{name}' for name in names)};"] if declare else []
    return [*declared, *lines, "}"]


def render_role(context: RoleContext) -> list[str]:
    """The functions of a role: the copies of an edge, and the walk over the edges of a piece."""
    problem, layout, lowered, launch = context.problem, context.layout, context.lowered, context.launch
    indexed, channels, batch = problem.indexed, layout.channels, launch.batch
    stage = lay_out(layout, context.stage_size)
    fetch = plan_fetch(layout, stage, f"{context.name}_fetch")
    rows = render_receivers(context)
    accumulators = [value for _, table in lowered.z_outputs for _, _, value in table]
    held = [value for _, table in lowered.z_operands for _, _, value in table]
    body = [
        *layout.declare_types(),
        *problem.declare_indices(),
        *_render_range(context),
        *(
            ["__syncwarp();  // all lanes are done with the role before, which used the same memory"]
            if context.follows
            else []
        ),
        f"const int u = {layout.first_channel()};",
        f"const int left = {layout.mul} - u;",
        "(void)left;",
    ]
    if problem.operands("y"):
        body.append(f"T* const table = {context.shared(context.table, context.table_size, of_warp=False)};")
    if context.transit_size:
        body.append(f"T* const transit = {context.shared(context.transit, context.transit_size, of_warp=True)};")
    if indexed:
        body += declare([*accumulators, *lowered.lost, *held], channels, zero=True)
        body += ["int row = -1;", *rows.functions]
    body += render_places(lowered) if problem.outputs("y") else []
    # Lane t holds the indices of the t-th edge of the batch, and of the t-th of those that are copied meanwhile, and of
    # both also those of the next batch, on their way.
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
        "  const int my_edge = next_edge;",
        *(["  const int my_sender = next_sender, my_receiver = next_receiver;"] if indexed else []),
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
    body += [*indent(_render_edge(context, stage, fetch, rows), 2), "  }", "}"]
    body += ["}", *rows.last] if indexed else []
    head = (
        f"__device__ __forceinline__ void {context.name}(const Args& args, unsigned char* shared_memory, int lane, "
        "int chunk, int team) {"
    )
    return [*(fetch.text if stage.size else ()), head, *indent(body), "}"]


def _render_edge(context: RoleContext, stage: Stage, fetch: Fetch, rows: ReceiverText) -> list[str]:
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
    elif context.transit_size:
        edge.append("__syncwarp();  // all lanes are done with what passed for the last edge")
    edge.append(
        "const int edge = __shfl_sync(0xffffffffu, my_edge, b);" if problem.ordered else "const int edge = base + b;"
    )
    edge.append("(void)edge;")
    gradients_w = {n: f"{problem.output(n)} + edge * {coupling.weight_numel}ll + u" for n in problem.outputs("w")}
    edge += [f"T* const gw{n} = {pointer};" for n, pointer in gradients_w.items()]
    shares = _share_rows(context)
    edge += [f"T* const share{order} = {row};" for order, row in enumerate(shares)]
    at = Addresses(
        w=lambda o, n: f"Shared::load(stage + {stage.w[o] + n * layout.slice} + w_lane, 32, left)",
        m=lambda o: f"m{o}",
        gw=lambda o, n, value: f"Global::store_once(gw{o} + {layout.paths[n].weight_offset}, 32, left, {value})",
    )
    if indexed:
        edge += [
            *rows.change,
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
        edge += declare(accumulators, channels, zero=True) + declare(held, channels, zero=False) + rows.load
    if problem.operands("w"):
        edge.append(f"const int w_lane = {f'{channels} * lane' if layout.packed else 'lane'};")
    block = 2 * layout.paths[0].l1 + 1
    for n, place in stage.x.items():
        names = [f"x{n}_i{i}" for i in range(block)]
        edge += [f"V {', '.join(names)};", *layout.move("load", "Shared", f"stage + {place}", names)]
    stride = table_stride(coupling, lowered.role)
    for order, n in enumerate(problem.operands("y")):
        edge += [f"const T* const m{n} = table + {order * launch.batch * stride} + b * {stride};", f"(void)m{n};"]
    edge += declare([v for v in lowered.program.inputs if v.name.startswith(("gx", "gy"))], channels, zero=True)
    edge += render_program(lowered, lowered.program, problem.number, at)
    edge += write_x_gradients(context, stage)
    if not indexed:
        for output, table in lowered.z_outputs:
            edge.append(f"T* const to{output} = {problem.output(output)} + row * {coupling.dim_out}ll;")
            edge += write_z(layout, f"to{output}", table)
    for order, sums in enumerate(lowered.program.y_sums):
        edge += render_lane_sums(problem, lowered, order, sums, "transit", f"share{order}")
        if not problem.has_shares and len(lowered.y_components) < coupling.dim_in2:
            # Nobody else writes the components that no path reads.
            missing = [j for j in range(coupling.dim_in2) if j not in lowered.y_components]
            test = " || ".join(f"j == {j}" for j in missing)
            edge.append(f"for (int j = lane; j < {coupling.dim_in2}; j += 32) if ({test}) share{order}[j] = T(0);")
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
