"""Gradients of y: sums over all channels, so over the lanes of a warp, the warps of a block, and the launches."""

from jaxcg.codegen.ir import Value
from jaxcg.codegen.lower import LoweredRole
from jaxcg.codegen.problem import Problem
from jaxcg.schedule import Launch


def _groups(role: LoweredRole) -> list[tuple[int, tuple[int, ...]]]:
    """Y components in groups that one transposing sum takes: (power of two, components)."""
    groups: list[tuple[int, tuple[int, ...]]] = []
    for start in range(0, len(role.y_components), 32):
        components = role.y_components[start : start + 32]
        size = 1
        while size < len(components):
            size *= 2
        groups.append((size, components))
    return groups


def render_places(role: LoweredRole) -> list[str]:
    """For each group: which y component this lane ends with, -1 for none."""
    lines: list[str] = []
    for group, (size, components) in enumerate(_groups(role)):
        each = 32 // size
        cases = " ".join(f"lane == {n * each} ? {j} :" for n, j in enumerate(components))
        lines.append(f"const int component{group} = {cases} -1;")
    return lines


def render_lane_sums(
    problem: Problem, launch: Launch, role: LoweredRole, order: int, sums: tuple[tuple[int, Value], ...], base: int,
    warp: str,
) -> list[str]:  # fmt: skip
    """Sum the y gradient of edge b over the lanes of this warp, into its row in shared memory."""
    names = {j: value.name for j, value in sums}
    width = problem.coupling.dim_in2
    lines: list[str] = []
    for group, (size, components) in enumerate(_groups(role)):
        values = [names[j] for j in components] + ["T(0)"] * (size - len(components))
        row = f"(({order * launch.warps} + {warp}) * {launch.batch} + b) * {width}"
        lines += [
            "{",
            f"  T v[{size}] = {{{', '.join(values)}}};",
            f"  const T total = transpose_sum<{size}, 16>(v, lane);",
            f"  if (component{group} >= 0)",
            f"    reinterpret_cast<T*>(shared_memory)[{base} + {row} + component{group}] = total;",
            "}",
        ]
    return lines


def render_block_sum(
    problem: Problem, launch: Launch, roles: tuple[LoweredRole, ...], name: str, base: int, first: bool
) -> list[str]:
    """The function that sums y gradients over the warps of a block.

    The first launch of a call writes every component, later ones add theirs: launches follow each other on a stream,
    so the sum is the same every time.
    """
    width = problem.coupling.dim_in2
    union = tuple(sorted({j for role in roles for j in role.y_components}))
    present = f"{problem.index('senders')}[edge] >= 0" if problem.indexed else "true"
    lines = [
        f"__device__ __forceinline__ void {name}(const Args& args, unsigned char* shared_memory, long long base, "
        "int count) {",
        f"  for (int t = threadIdx.x; t < count * {width}; t += blockDim.x) {{",
        f"    const int b = t / {width}, j = t % {width};",
        f"    const long long edge = {problem.edge_at('base + b')};",
        f"    const bool present = {present};",
    ]
    for order, output in enumerate(problem.outputs("y")):
        lines += ["    {", "      T sum = T(0);", "      if (present) {"]
        warp = 0
        for role in roles:
            for _ in range(role.role.chunks):
                row = f"{base} + ({(order * launch.warps + warp) * launch.batch} + b) * {width} + j"
                test = _member(role.y_components, width)
                lines.append(f"        if ({test}) sum += reinterpret_cast<const T*>(shared_memory)[{row}];")
                warp += 1
        target = f"{problem.output(output)}[edge * {width} + j]"
        write = f"{target} = sum;" if first else f"if ({_member(union, width)}) {target} += sum;"
        lines += ["      }", f"      {write}", "    }"]
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
