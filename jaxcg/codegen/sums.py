"""Gradients of y: sums over all channels, so over the lanes of a warp, and over all warps that take part.

Each warp that takes part writes its share of an edge to a row of its own in a scratch buffer, a *share*, and a last
launch adds the shares in order, so the sum does not depend on timing. If one warp does all channels and paths, its
share is the gradient.
"""

from jaxcg.codegen.ir import Value
from jaxcg.codegen.lower import LoweredRole
from jaxcg.codegen.problem import Problem, indent
from jaxcg.schedule.shared import LANE_SUMS, group_components

# Edges that one block of the last launch takes.
SUM_EDGES = 64


def _groups(role: LoweredRole) -> list[tuple[int, tuple[int, ...]]]:
    """Y components in groups that one sum over lanes takes: (power of two, components)."""
    groups: list[tuple[int, tuple[int, ...]]] = []
    start = 0
    for size in group_components(len(role.y_components)):
        groups.append((size, role.y_components[start : start + size]))
        start += size
    return groups


def render_places(role: LoweredRole) -> list[str]:
    """For each group: which y component this lane ends with, -1 for none."""
    lines: list[str] = []
    for group, (size, components) in enumerate(_groups(role)):
        each = 1 if size in LANE_SUMS else 32 // size
        start, count = components[0], len(components)
        if each == 1 and components == tuple(range(start, start + count)):
            lines.append(f"const int component{group} = lane < {count} ? {start} + lane : -1;")
            continue
        cases = " ".join(f"lane == {n * each} ? {j} :" for n, j in enumerate(components))
        lines.append(f"const int component{group} = {cases} -1;")
    return lines


def render_lane_sums(
    problem: Problem, role: LoweredRole, order: int, sums: tuple[tuple[int, Value], ...], place: str, row: str
) -> list[str]:
    """Sum the y gradient of an edge over the lanes of this warp, and write it to its row.

    Args:
        problem: what is computed.
        role: who computes.
        order: number of the y output among the y outputs.
        sums: the value of each component in each lane.
        place: pointer to this warp's room in shared memory.
        row: pointer to the row.
    """
    names = {j: value.name for j, value in sums}
    lines: list[str] = []
    for group, (size, components) in enumerate(_groups(role)):
        values = [names[j] for j in components] + ["T(0)"] * (size - len(components))
        if group or order:
            lines.append("__syncwarp();")
        call = f"sum_lanes({place}, v, lane)" if size in LANE_SUMS else f"transpose_sum<{size}, 16>(v, lane)"
        lines += [
            "{",
            f"  T v[{size}] = {{{', '.join(values)}}};",
            f"  const T total = {call};",
            f"  if (component{group} >= 0) {row}[component{group}] = total;",
            "}",
        ]
    return lines


def render_share_sum(problem: Problem, shares: list[tuple[int, ...]], name: str) -> list[str]:
    """The kernel that adds the shares of each edge; an absent edge gets zeros.

    Args:
        problem: what is computed.
        shares: the components that each share holds.
        name: of the kernel.
    """
    width = problem.coupling.dim_in2
    # Four neighbours a thread where all shares that hold one of them hold all.
    unit = 4 if width % 4 == 0 else 1
    while unit > 1 and any(
        0 < len(set(range(j, j + unit)) & set(share)) < unit for share in shares for j in range(0, width, unit)
    ):
        unit = 1
    present = "senders[edge] >= 0" if problem.indexed else "true"
    lines = [
        f'extern "C" __global__ void __launch_bounds__(256) {name}(const Args args) {{',
        *indent(problem.declare_indices()),
        "  release_next_launch();",
        "  await_last_launch();",
        f"  const long long first = {SUM_EDGES}ll * blockIdx.x;",
        f"  const int count = args.sizes[0] - first < {SUM_EDGES} ? static_cast<int>(args.sizes[0] - first) : "
        f"{SUM_EDGES};",
        f"  for (int t = threadIdx.x; t < count * {width // unit}; t += blockDim.x) {{",
        f"    const int j = t % {width // unit} * {unit};",
        f"    const long long edge = {problem.edge_at(f'first + t / {width // unit}')};",
        f"    const bool present = {present};",
    ]
    for order, output in enumerate(problem.outputs("y")):
        lines += [f"    Pack<T, {unit}> sum{order};", f"    for (int v = 0; v < {unit}; ++v) sum{order}.v[v] = T(0);"]
        lines.append("    if (present) {")
        for number, components in enumerate(shares):
            share = problem.share(f"{order * len(shares) + number}", "edge")
            test = _member(components, width)
            add = f"add_pack(sum{order}, {share} + j);"
            lines += indent([add if test == "true" else f"if ({test}) {add}"], 3)
        target = f"{problem.output(output)} + edge * {width} + j"
        lines += ["    }", f"    *reinterpret_cast<Pack<T, {unit}>*>({target}) = sum{order};"]
    return [*lines, "  }", "}"]


def _member(components: tuple[int, ...], width: int) -> str:
    """Condition that component j is one of `components`."""
    if len(components) == width:
        return "true"
    runs: list[list[int]] = []
    for j in components:
        if runs and runs[-1][1] + 1 == j:
            runs[-1][1] = j
        else:
            runs.append([j, j])
    return " || ".join(f"(j >= {a} && j <= {b})" for a, b in runs) or "false"
