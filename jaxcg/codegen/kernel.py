"""The kernels of a call.

A block holds teams of warps. Together they do all roles of the launch on the block's contiguous range of edges, sorted
by receiver. The teams divide this work evenly: each does a piece of a role, a contiguous range of edges, and where that
role ends, a piece of the next; it waits for no other team. In batches of up to 32 edges, lane b holds the indices of
edge b and makes its row of M in shared memory. Accumulators of the current receiver stay in registers; each receiver is
written once, without atomics. A receiver that a boundary between pieces cuts is written by the piece in which it
starts; the parts of later pieces go to scratch rows, and a last launch adds them in a fixed order, so z does not depend
on timing. (Sorted receivers and a fix-up of cut rows: Bharadwaj et al., arXiv:2501.13986, on fused graph convolution.)
"""

from math import gcd

from jaxcg.codegen.context import RoleContext
from jaxcg.codegen.lower import LoweredRole
from jaxcg.codegen.problem import Problem, indent
from jaxcg.codegen.role import render_role
from jaxcg.schedule import Schedule, plan_shared
from jaxcg.schedule.shared import ring_stages, stage_elements

# A block of the fix-up; each thread has 16 bytes of shared memory. Small ones, so that those of all pieces are on the
# device at once: most pieces continue nothing, and their blocks end after two dependent loads.
FIX_UP_THREADS = 128
_FIX_UP_BLOCKS = 11


def render_kernel(
    problem: Problem, schedule: Schedule, number: int, roles: tuple[LoweredRole, ...], name: str
) -> list[str]:
    """One launch: the functions of its roles and the kernel that hands warps to roles."""
    launch = schedule.launches[number]
    plan = plan_shared(problem.coupling, problem.terms, launch)
    lines: list[str] = []
    writers: dict[int, int] = {}
    for other in schedule.launches:
        for role in other.roles:
            block = problem.coupling.paths[role.paths[0]].in1_block
            writers[block] = writers.get(block, 0) + (role.chunk_start == 0)
    before = [role for other in schedule.launches[:number] for role in other.roles]
    region, share = len(before), sum(role.chunks for role in before)
    warp, barrier, n = 0, 0, 0
    dispatch: list[str] = []
    for g, group in enumerate(launch.groups):
        own = "warp" if warp == 0 else f"(warp - {warp})"
        warp += group.teams * group.chunks
        test = f"if (warp < {warp}) " if g + 1 < len(launch.groups) else ""
        dispatch.append(f"{'} else ' if g else ''}{test}{{")
        start = n
        for lowered in roles[n : n + len(group.roles)]:
            role = lowered.role
            stage_size = stage_elements(problem.coupling, problem.terms, role)
            context = RoleContext(
                problem=problem,
                launch=launch,
                lowered=lowered,
                name=f"{name}_role_{n}",
                table=plan.tables[g],
                table_size=plan.table_sizes[g],
                transit=plan.transits[g],
                transit_size=plan.transit_sizes[g],
                ring=plan.rings[g],
                ring_size=plan.ring_sizes[g],
                stages=ring_stages(plan.ring_sizes[g], stage_size),
                stage_size=stage_size,
                follows=n > start,
                first_barrier=barrier,
                first_share=share,
                region=region + n,
                max_pieces=schedule.max_pieces,
                exclusive=not problem.indexed and writers[lowered.paths[0].in1_block] == 1,
            )
            lines += render_role(context)
            chunk = str(role.chunk_start) if role.chunks == 1 else f"{role.chunk_start} + {own} % {role.chunks}"
            team = own if role.chunks == 1 else f"{own} / {role.chunks}"
            dispatch.append(f"  {context.name}(args, shared_memory, lane, {chunk}, {team});")
            share += role.chunks
            n += 1
        barrier += group.teams if group.chunks > 1 else 0
    dispatch.append("}")
    return [
        *lines,
        f'extern "C" __global__ void __launch_bounds__({32 * launch.warps}, 1) {name}(const Args args) {{',
        "  extern __shared__ __align__(16) unsigned char shared_memory[];",
        "  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;",
        "  (void)warp;",
        "  release_next_launch();",
        *indent(dispatch),
        # The launches of a call write different rows and columns, or add atomically, so they may overlap; but the last
        # one must not end before all have.
        *(["  await_last_launch();"] if number else []),
        "}",
    ]


def render_fix_up(problem: Problem, schedule: Schedule, columns: list[list[tuple[int, int]]], name: str) -> list[str]:
    """The kernel that adds the scratch rows of receivers cut by boundaries between pieces.

    In order of edges; of more than 32 pieces, every 16th together and then these sums.

    Args:
        problem: what is computed.
        schedule: its launches.
        columns: for each role, (start, length) ranges of the z row that it writes.
        name: of the kernel.

    Returns:
        The text. The buffer of marks holds, for each role, its number of pieces, then for each piece the receiver that
        it continues, or -1. There is a block for each piece of each role. Those of all pieces that continue the same
        receiver, one after the other, share its columns out among them.
    """
    width, stride = problem.coupling.dim_out, schedule.max_pieces + 1
    pieces = [schedule.max_blocks * role.pieces for launch in schedule.launches for role in launch.roles]
    lines = [
        f'extern "C" __global__ void __launch_bounds__({FIX_UP_THREADS}, {_FIX_UP_BLOCKS}) {name}(const Args args) {{',
        "  extern __shared__ __align__(16) unsigned char room[];",
        "  release_next_launch();",
        "  int piece = blockIdx.x, role = 0;",
        "  const int most = static_cast<int>(args.sizes[3]);",
    ]
    for number, found in enumerate(pieces[:-1]):
        lines += [
            f"  if (role == {number} && piece >= (most < {found} ? most : {found})) "
            f"piece -= most < {found} ? most : {found}, ++role;",
        ]
    lines += [
        f"  const int* const marks = static_cast<const int*>({problem.extra(1)}) + role * {stride} + 1;",
        "  await_last_launch();",
        "  const int count = marks[-1], row = marks[piece];",
        "  if (piece >= count || row < 0) return;",
        "  const int lane = threadIdx.x % 32;",
        "  const int first = run_start(marks, piece, row, lane), last = run_end(marks, piece + 1, count, row, lane);",
    ]
    # Columns in units that one access moves. A role's are numbered through, so that threads share all of them out.
    unit = gcd(
        16 // problem.number.itemsize, width, *(number for ranges in columns for part in ranges for number in part)
    )
    lines += ["  int units = 0;", "  const auto column = [role](int n) {"]
    totals: list[str] = []
    for number, ranges in enumerate(columns):
        end, cases = 0, ""
        for start, length in ranges[:-1]:
            cases += f"n < {end + length // unit} ? {start // unit - end} : "
            end += length // unit
        start, length = ranges[-1]
        lines.append(f"    if (role == {number}) return n + ({cases}{start // unit - end});")
        totals.append(f"  if (role == {number}) units = {end + length // unit};")
    lines += ["    return n;", "  };", *totals]
    flag = "true" if schedule.compensated else "false"
    for order, output in enumerate(problem.outputs("z")):
        z = f"{problem.output(output)} + row * {width}ll"
        rows = f"static_cast<const T*>({problem.extra(0)}) + ({order} * args.sizes[3] + first) * {width}ll"
        lines.append(
            f"  add_rows<{unit}, {width}, {flag}>({z}, {rows}, last - first, units, piece - first, room, column);"
        )
    return [*lines, "}"]
