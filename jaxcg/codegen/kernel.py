"""The kernels of a call.

One block owns a contiguous range of edges, sorted by receiver, and all its warps walk it together: a role a warp. In
batches of up to 32 edges, lane b holds the indices of edge b and makes its row of M in shared memory. Accumulators of
the current receiver stay in registers; each receiver is written once, without atomics. A receiver that a range
boundary cuts is written by the block in which it starts; the parts of later blocks go to scratch rows, and a last
launch adds them in order, so z does not depend on timing. (Sorted receivers and a fix-up of cut rows: Bharadwaj et al.,
arXiv:2501.13986, on fused graph convolution.)
"""

from jaxcg.codegen.lower import LoweredRole
from jaxcg.codegen.problem import Problem, indent
from jaxcg.codegen.role import RoleContext, render_role
from jaxcg.codegen.sums import render_block_sum
from jaxcg.schedule import Schedule, plan_shared


def render_kernel(
    problem: Problem, schedule: Schedule, number: int, roles: tuple[LoweredRole, ...], name: str
) -> list[str]:
    """One launch: the functions of its roles and the kernel that hands warps to roles."""
    launch = schedule.launches[number]
    plan = plan_shared(problem.coupling, problem.terms, launch)
    lines: list[str] = []
    sum_name = None
    if problem.outputs("y"):
        sum_name = f"{name}_sum_y"
        lines += render_block_sum(problem, launch, roles, sum_name, plan.sums, number == 0)
    writers: dict[int, int] = {}
    for other in schedule.launches:
        for role in other.roles:
            block = problem.coupling.paths[role.paths[0]].in1_block
            writers[block] = writers.get(block, 0) + (role.chunk_start == 0)
    warp = 0
    dispatch: list[str] = []
    for n, role in enumerate(roles):
        context = RoleContext(
            problem=problem,
            launch=launch,
            lowered=role,
            number=n,
            name=f"{name}_role_{n}",
            table=plan.tables[n],
            sums=plan.sums,
            ring=plan.rings[n],
            stage_size=plan.stages[n],
            first_warp=warp,
            sum_name=sum_name,
            exclusive=not problem.indexed and writers[role.paths[0].in1_block] == 1,
        )
        lines += render_role(context)
        shift = role.role.chunk_start - warp
        warp += role.role.chunks
        chunk = "warp" if shift == 0 else f"warp {'+' if shift > 0 else '-'} {abs(shift)}"
        test = f"if (warp < {warp}) " if n + 1 < len(roles) else ""
        dispatch.append(f"{'else ' if n else ''}{test}{context.name}(args, shared_memory, lane, {chunk}, first, last);")
    bounds = f"__launch_bounds__({32 * launch.warps}, {launch.blocks_per_multiprocessor})"
    lines += [
        f'extern "C" __global__ void {bounds} {name}(const Args args) {{',
        "  extern __shared__ __align__(16) unsigned char shared_memory[];",
        "  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;",
        "  const long long edges = args.sizes[0];",
        "  const long long first = edges * blockIdx.x / gridDim.x, last = edges * (blockIdx.x + 1ll) / gridDim.x;",
        "  (void)warp;",
    ]
    if problem.has_scratch:
        receivers, stride = problem.index("receivers"), schedule.max_blocks + 1
        lines += [
            "  if (threadIdx.x == 0) {",
            f"    int* const continued = static_cast<int*>({problem.extra(1)}) + {number * stride};",
            f"    const int row = {receivers}[{problem.edge_at('first')}];",
            f"    const bool cut = first > 0 && {receivers}[{problem.edge_at('first - 1')}] == row;",
            "    continued[1 + blockIdx.x] = cut ? row : -1;",
            "    if (blockIdx.x == 0) continued[0] = gridDim.x;",
            "  }",
        ]
    return [*lines, *indent(dispatch), "}"]


# Columns of a z row that one block of the fix-up takes: four a thread, so that its loads overlap. With one block for a
# whole row, the forward pass of mace-large (float32, dhfr) took 0.206 ms; in parts, and with barriers by role, 0.196.
FIX_UP_COLUMNS = 1024


def fix_up_parts(width: int) -> int:
    """Blocks of the fix-up for each block of the main launches."""
    return -(-width // FIX_UP_COLUMNS)


def render_fix_up(problem: Problem, schedule: Schedule, columns: list[list[tuple[int, int]]], name: str) -> list[str]:
    """The kernel that adds the scratch rows of receivers cut by block boundaries, in order of edges.

    Args:
        problem: what is computed.
        schedule: its launches.
        columns: for each launch, (start, length) ranges of the z row that it writes.
        name: of the kernel.

    Returns:
        The text. The buffer of marks holds, for each launch, its number of blocks, then for each block the receiver
        that it continues, or -1. Thread t of part p of block b adds to columns 1024 p + 256 i + t, i < 4, of the
        receiver that block b continues, if no block before it continues the same one.
    """
    width, stride = problem.coupling.dim_out, schedule.max_blocks + 1
    parts = fix_up_parts(width)
    owner = " ".join(
        f"c < {start + length} ? {number} :"
        for start, length, number in sorted(
            (start, length, number) for number, ranges in enumerate(columns) for start, length in ranges
        )
    )
    lines = [
        f'extern "C" __global__ void __launch_bounds__(256) {name}(const Args args) {{',
        f"  const int block = blockIdx.x / {parts}, part = blockIdx.x % {parts};",
        "#pragma unroll",
        f"  for (int i = 0; i < {FIX_UP_COLUMNS // 256}; ++i) {{",
        f"    const int c = {FIX_UP_COLUMNS} * part + 256 * i + threadIdx.x;",
        f"    const int launch = {owner} -1;",
        "    if (launch < 0) continue;",
        f"    const int* const continued = static_cast<const int*>({problem.extra(1)}) + launch * {stride};",
        "    const int blocks = continued[0];",
        "    const int row = block < blocks ? continued[1 + block] : -1;",
        "    if (row < 0 || (block > 0 && continued[block] == row)) continue;",
    ]
    for order, output in enumerate(problem.outputs("z")):
        scratch = f"static_cast<const T*>({problem.extra(0)}) + ({order} * args.sizes[3] + block) * {width}ll + c"
        lines += [
            "    {",
            f"      T* const z = {problem.output(output)} + row * {width}ll + c;",
            f"      const T* part_of_z = {scratch};",
            "      T sum = *z;",
            f"      for (int h = block; h < blocks && continued[1 + h] == row; ++h, part_of_z += {width})",
            "        sum += *part_of_z;",
            "      *z = sum;",
            "    }",
        ]
    return [*lines, "  }", "}"]
