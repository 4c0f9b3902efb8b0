"""The kernels of a call.

A block holds teams of warps. A team does one role on a contiguous range of edges, sorted by receiver, and waits for no
other team. In batches of up to 32 edges, lane b holds the indices of edge b and makes its row of M in shared memory.
Accumulators of the current receiver stay in registers; each receiver is written once, without atomics. A receiver that
a boundary between ranges cuts is written by the team in which it starts; the parts of later teams go to scratch rows,
and a last launch adds them in order, so z does not depend on timing. (Sorted receivers and a fix-up of cut rows:
Bharadwaj et al., arXiv:2501.13986, on fused graph convolution.)
"""

from math import gcd

from jaxcg.codegen.lower import LoweredRole
from jaxcg.codegen.problem import Problem, indent
from jaxcg.codegen.role import RoleContext, render_role
from jaxcg.schedule import Schedule, plan_shared


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
    warp, barrier = 0, 0
    region, share = len(before), sum(role.chunks for role in before)
    dispatch: list[str] = []
    for n, lowered in enumerate(roles):
        role = lowered.role
        context = RoleContext(
            problem=problem,
            launch=launch,
            lowered=lowered,
            name=f"{name}_role_{n}",
            table=plan.tables[n],
            table_size=plan.table_sizes[n],
            sums=plan.sums[n],
            sum_size=plan.sum_sizes[n],
            ring=plan.rings[n],
            stage_size=plan.stage_sizes[n],
            first_barrier=barrier,
            first_share=share,
            region=region + n,
            max_teams=schedule.max_teams,
            exclusive=not problem.indexed and writers[lowered.paths[0].in1_block] == 1,
        )
        lines += render_role(context)
        own = "warp" if warp == 0 else f"(warp - {warp})"
        chunk = str(role.chunk_start) if role.chunks == 1 else f"{role.chunk_start} + {own} % {role.chunks}"
        stream = own if role.chunks == 1 else f"{own} / {role.chunks}"
        warp += role.warps
        barrier += role.streams if role.chunks > 1 else 0
        share += role.chunks
        test = f"if (warp < {warp}) " if n + 1 < len(roles) else ""
        dispatch.append(f"{'else ' if n else ''}{test}{context.name}(args, shared_memory, lane, {chunk}, {stream});")
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


# Columns of a z row that one block of the fix-up takes, four or so a thread, and teams that it looks after. With one
# block for a whole row, the forward pass of mace-large (float32, dhfr) took 0.206 ms; in parts 0.196. With a block for
# each team, most of which find nothing to do, the fix-up alone took 21 us.
FIX_UP_COLUMNS = 1024
FIX_UP_TEAMS = 4


def fix_up_parts(columns: list[list[tuple[int, int]]]) -> int:
    """Blocks of the fix-up for each few teams."""
    return max(-(-sum(length for _, length in ranges) // FIX_UP_COLUMNS) for ranges in columns)


def render_fix_up(problem: Problem, schedule: Schedule, columns: list[list[tuple[int, int]]], name: str) -> list[str]:
    """The kernel that adds the scratch rows of receivers cut by boundaries between teams, in order of edges.

    Args:
        problem: what is computed.
        schedule: its launches.
        columns: for each role, (start, length) ranges of the z row that it writes.
        name: of the kernel.

    Returns:
        The text. The buffer of marks holds, for each role, its number of teams, then for each team the receiver that
        it continues, or -1. A block looks after a role, `FIX_UP_TEAMS` of its teams, and a part of its columns. The
        first team that continues a receiver stands for all that do.
    """
    width, stride, parts = problem.coupling.dim_out, schedule.max_teams + 1, fix_up_parts(columns)
    lines = [
        f'extern "C" __global__ void __launch_bounds__(256) {name}(const Args args) {{',
        "  release_next_launch();",
        "  await_last_launch();",
        f"  const int role = blockIdx.x % {len(columns)}, part = blockIdx.x / {len(columns)} % {parts};",
        f"  const int start = blockIdx.x / {len(columns) * parts} * {FIX_UP_TEAMS};",
        f"  const int* const continued = static_cast<const int*>({problem.extra(1)}) + role * {stride};",
        "  const int teams = continued[0];",
        f"  for (int team = start; team < start + {FIX_UP_TEAMS} && team < teams; ++team) {{",
        "    const int row = continued[1 + team];",
        "    if (row < 0 || (team > 0 && continued[team] == row)) continue;",
        "    int last = team + 1;",
        "    while (last < teams && continued[1 + last] == row) ++last;",
    ]
    for order, output in enumerate(problem.outputs("z")):
        lines += [
            "    {",
            f"      T* const z = {problem.output(output)} + row * {width}ll;",
            f"      const T* const rows = static_cast<const T*>({problem.extra(0)}) + "
            f"({order} * args.sizes[3] + team) * {width}ll;",
        ]
        for number, ranges in enumerate(columns):
            lines.append(f"      if (role == {number}) {{")
            at = 0
            for start, length in ranges:
                unit = gcd(16 // problem.number.itemsize, start, length, width, at)
                lines.append(
                    f"        add_rows<{unit}, {width}>(z + {start}, rows + {start}, last - team, {length}, "
                    f"{FIX_UP_COLUMNS} * part - {at});"
                )
                at += length
            lines.append("      }")
        lines.append("    }")
    return [*lines, "  }", "}"]
