"""The kernels of a call: ranges of edges, batches, receivers, sums of y gradients, and the fix-up of cut receivers.

One block owns a contiguous range of edges, sorted by receiver, and all its warps walk it together: a role a warp.
In batches of up to 32 edges, lane b holds edge b and makes its row of M in shared memory. Accumulators of the
current receiver stay in registers; each receiver is written once, without atomics. A receiver that a range boundary
cuts is written by the block in which it starts; the parts of later blocks go to scratch rows, and a last launch adds
them in order, so z does not depend on timing.
"""

from dataclasses import dataclass

from jaxcg._coupling import Coupling
from jaxcg._terms import TermSet
from jaxcg.codegen.lower import LoweredRole
from jaxcg.codegen.render import Addresses, Number, declare, render_combination, render_program
from jaxcg.schedule.choose import Launch, Schedule, shared_stride


@dataclass(frozen=True)
class Problem:
    """What the text depends on, beside schedule and programs.

    Attributes:
        coupling: the product.
        terms: what is computed.
        indexed: whether x and z rows go through senders and receivers.
        ordered: whether edges are read through an order.
        number: the dtype.
    """

    coupling: Coupling
    terms: TermSet
    indexed: bool
    ordered: bool
    number: Number

    @property
    def num_indices(self) -> int:
        return (2 if self.indexed else 0) + (1 if self.ordered else 0)

    @property
    def z_outputs(self) -> tuple[int, ...]:
        return tuple(n for n, out in enumerate(self.terms.outputs) if out.slot == "z")

    @property
    def y_outputs(self) -> tuple[int, ...]:
        return tuple(n for n, out in enumerate(self.terms.outputs) if out.slot == "y")

    @property
    def has_scratch(self) -> bool:
        return self.indexed and bool(self.z_outputs)

    def operand(self, n: int) -> str:
        """Pointer to operand n."""
        return f"static_cast<const T*>(args.buffers[{self.num_indices + n}])"

    def output(self, n: int) -> str:
        """Pointer to output n."""
        return f"static_cast<T*>(args.buffers[{self.num_indices + len(self.terms.operands) + n}])"

    def extra(self, n: int) -> str:
        """Pointer to the n-th buffer after the outputs."""
        return f"args.buffers[{self.num_indices + len(self.terms.operands) + len(self.terms.outputs) + n}]"


def _offset(problem: Problem, start: int, mul: int, components: int, component: int) -> str:
    """Element offset of one component of a block at channel u."""
    if problem.coupling.layout == "ir_mul":
        return f"{start + component * mul} + u"
    return f"{start + component} + u * {components}"


def _step(problem: Problem, components: int) -> int:
    """Elements between channels u and u + 32."""
    return 32 if problem.coupling.layout == "ir_mul" else 32 * components


def _z_moves(
    problem: Problem, role: LoweredRole, table: tuple[tuple[int, int, object], ...]
) -> list[tuple[str, int, str]]:
    """(offset, step, value name) for each component of a z row of this role."""
    moves = []
    for n, k, value in table:
        path = role.paths[n]
        components = 2 * path.l3 + 1
        offset = _offset(problem, path.out_offset, path.mul1, components, k)
        moves.append((offset, _step(problem, components), value.name))  # type: ignore[attr-defined]
    return moves


def _make_table(problem: Problem, role: LoweredRole, launch: Launch, base: int) -> list[str]:
    """Text that makes M of lane b's edge: quads are shared out over the warps of the role."""
    lines: list[str] = []
    chunks = role.role.chunks
    stride = shared_stride(problem.coupling, role.role)
    for order, operand in enumerate(n for n, slot in enumerate(problem.terms.operands) if slot == "y"):
        lines.append(f"const T* const y{operand} = {problem.operand(operand)} + my_edge * {problem.coupling.dim_in2};")
        lines.append(
            f"T* const row{operand} = reinterpret_cast<T*>(shared_memory) + {base + order * launch.batch * stride}"
            f" + lane * {stride};"
        )
        quads = [role.entries[4 * q : 4 * q + 4] for q in range(len(role.entries) // 4)]
        for share in range(chunks):
            mine = [(q, quad) for q, quad in enumerate(quads) if q % chunks == share]
            if not mine:
                continue
            if chunks > 1:
                lines.append(f"if (chunk == {role.role.chunk_start + share}) {{")
            for q, quad in mine:
                values = [
                    "T(0)"
                    if entry is None
                    else render_combination(entry.column, problem.number, lambda j, o=operand: f"__ldg(y{o} + {j})")
                    for entry in quad
                ]
                lines.append(f"  store_quad(row{operand} + {4 * q}, {', '.join(values)});")
            if chunks > 1:
                lines.append("}")
    return lines


def _table_elements(problem: Problem, role: LoweredRole, launch: Launch) -> int:
    return problem.terms.operands.count("y") * launch.batch * shared_stride(problem.coupling, role.role)


def _indent(lines: list[str], depth: int) -> list[str]:
    return [("  " * depth + line) if line and not line.startswith("#") else line for line in lines]


def render_role(
    problem: Problem, launch: Launch, role: LoweredRole, name: str, table_base: int, sums_base: int, first_warp: int,
    sum_name: str | None, exclusive: bool,
) -> list[str]:  # fmt: skip
    """The function of one role: everything a warp does.

    Args:
        problem: what is computed.
        launch: the kernel that it is part of.
        role: the lowered role.
        name: its name.
        table_base: first element of M in shared memory.
        sums_base: first element of the y partial sums in shared memory.
        first_warp: number of its first warp in the block.
        sum_name: function that adds up y gradients, None when there are none.
        exclusive: whether nobody else adds to its x gradients, so that plain stores do.
    """
    coupling, terms, indexed = problem.coupling, problem.terms, problem.indexed
    channels, first_path = role.role.channels, role.paths[0]
    mul, x_components = first_path.mul1, 2 * first_path.l1 + 1
    full = mul % (32 * channels) == 0
    full_text = "true" if full else "false"
    stride = shared_stride(coupling, role.role)
    y_operands = [n for n, slot in enumerate(terms.operands) if slot == "y"]
    moved = f"<{full_text}, {channels}>"
    at = Addresses(
        w=lambda o, n: f"w{o} + {role.paths[n].weight_offset}",
        m=lambda o: f"m{o}",
        gw=lambda o, n: f"gw{o} + {role.paths[n].weight_offset}",
        full=full_text,
    )
    body: list[str] = []
    emit = body.append
    emit(f"const int u = chunk * {32 * channels} + lane;")
    emit(f"const int left = {mul} - u;")
    emit("(void)left;")
    if indexed:
        emit("const int* const senders = static_cast<const int*>(args.buffers[0]);")
        emit("const int* const receivers = static_cast<const int*>(args.buffers[1]);")
    if problem.ordered:
        emit("const int* const order = static_cast<const int*>(args.buffers[2]);")
    accumulators = [value for _, table in role.z_outputs for _, _, value in table]
    held = [value for _, table in role.z_operands for _, _, value in table]
    if indexed:
        body += declare(accumulators, channels, zero=True) + declare(held, channels, zero=True)
        previous = "order[first - 1]" if problem.ordered else "first - 1"
        emit(f"const long long before = first > 0 ? receivers[{previous}] : -1;")
        emit("long long row = -1;")
        emit("bool continued = false;")
        emit("(void)before; (void)continued;")
    if problem.y_outputs:
        body += _sum_positions(role)

    def write_z(target: str, zero: bool, output: int) -> list[str]:
        table = dict(role.z_outputs)[output]
        value = lambda name: f"zeros<T, {channels}>()" if zero else name  # noqa: E731
        return [
            f"store{moved}({target} + {offset}, {step}, left, {value(name)});"
            for offset, step, name in _z_moves(problem, role, table)
        ]

    def flush() -> list[str]:
        lines = []
        for order, output in enumerate(problem.z_outputs):
            scratch = (
                f"static_cast<T*>({problem.extra(0)}) + ({order} * args.sizes[3] + blockIdx.x) * {coupling.dim_out}ll"
            )
            target = f"{problem.output(output)} + row * {coupling.dim_out}ll"
            lines += [
                f"T* const to{output} = continued ? {scratch} : {target};",
                *write_z(f"to{output}", False, output),
            ]
        return lines

    def zero_rows(start: str, end: str) -> list[str]:
        lines = [f"for (long long empty = {start}; empty < {end}; ++empty) {{"]
        for output in problem.z_outputs:
            lines.append(f"  T* const to{output} = {problem.output(output)} + empty * {coupling.dim_out}ll;")
            lines += _indent(write_z(f"to{output}", True, output), 1)
        return [*lines, "}"]

    def load_z(row: str) -> list[str]:
        lines = []
        for operand, table in role.z_operands:
            lines.append(f"const T* const from{operand} = {problem.operand(operand)} + {row} * {coupling.dim_out}ll;")
            lines += [
                f"{name} = load{moved}(from{operand} + {offset}, {step}, left);"
                for offset, step, name in _z_moves(problem, role, table)
            ]
        return lines

    emit(f"for (long long base = first; base < last; base += {launch.batch}) {{")
    emit(f"  const int count = static_cast<int>(last - base < {launch.batch} ? last - base : {launch.batch});")
    emit("  const long long position = base + (lane < count ? lane : count - 1);")
    emit(f"  const long long my_edge = {'order[position]' if problem.ordered else 'position'};")
    if indexed:
        emit("  const int my_sender = senders[my_edge], my_receiver = receivers[my_edge];")
    if y_operands or problem.y_outputs:
        emit("  block_barrier();  // the block is done with the shared memory of the last batch")
    if y_operands:
        emit("  if (lane < count) {")
        body += _indent(_make_table(problem, role, launch, table_base), 2)
        emit("  }")
        emit("  block_barrier();  // M is complete")
    emit("#pragma unroll 1")
    emit("  for (int b = 0; b < count; ++b) {")
    inner: list[str] = []
    if problem.ordered:
        inner.append("const long long edge = __shfl_sync(0xffffffffu, static_cast<int>(my_edge), b);")
    else:
        inner.append("const long long edge = base + b;")
    if indexed:
        inner.append("const int sender = __shfl_sync(0xffffffffu, my_sender, b);")
        inner.append("const int receiver = __shfl_sync(0xffffffffu, my_receiver, b);")
        inner.append("if (receiver != row) {")
        if problem.z_outputs:
            inner += ["  if (row >= 0) {", *_indent(flush(), 2), "  }"]
            inner += _indent(zero_rows("(row >= 0 ? row : before) + 1", "receiver"), 1)
            inner.append("  continued = row < 0 && before == receiver;")
            inner += [f"  {value.name} = zeros<T, {channels}>();" for value in accumulators]
        inner.append("  row = receiver;")
        inner += _indent(load_z("row"), 1)
        inner.append("}")
        inner.append("if (sender < 0) {  // an absent edge: its gradients are 0, whatever its operands hold")
        for n, out in enumerate(terms.outputs):
            if out.slot == "w":
                inner.append(f"  T* const gw{n} = {problem.output(n)} + edge * {coupling.weight_numel}ll + u;")
                inner += [
                    f"  store{moved}({at.gw(n, p)}, 32, left, zeros<T, {channels}>());" for p in range(len(role.paths))
                ]
        inner += ["  continue;", "}"]
    else:
        inner.append("const long long sender = edge, row = edge;")
        inner += declare(accumulators, channels, zero=True) + declare(held, channels, zero=False)
        inner += load_z("row")
    for n, slot in enumerate(terms.operands):
        if slot == "x":
            block = f"{problem.operand(n)} + sender * {coupling.dim_in1}ll"
            inner.append(f"const T* const x{n} = {block};")
            for i in range(x_components):
                offset = _offset(problem, first_path.in1_offset, mul, x_components, i)
                step = _step(problem, x_components)
                inner.append(f"const Lanes<T, {channels}> x{n}_i{i} = load{moved}(x{n} + {offset}, {step}, left);")
        elif slot == "w":
            inner.append(f"const T* const w{n} = {problem.operand(n)} + edge * {coupling.weight_numel}ll + u;")
    for order, n in enumerate(y_operands):
        start = table_base + order * launch.batch * stride
        inner.append(f"const T* const m{n} = reinterpret_cast<const T*>(shared_memory) + {start} + b * {stride};")
        inner.append(f"(void)m{n};")
    for n, out in enumerate(terms.outputs):
        if out.slot == "w":
            inner.append(f"T* const gw{n} = {problem.output(n)} + edge * {coupling.weight_numel}ll + u;")
    per_edge = [v for v in role.program.inputs if v.name.startswith(("gx", "gy"))]
    inner += declare(per_edge, channels, zero=True)
    inner += render_program(role, role.program, problem.number, at)
    for n, out in enumerate(terms.outputs):
        if out.slot != "x":
            continue
        inner.append(f"T* const gx{n} = {problem.output(n)} + sender * {coupling.dim_in1}ll;")
        for i in range(x_components):
            offset = _offset(problem, first_path.in1_offset, mul, x_components, i)
            verb = "store" if exclusive else "add_atomically"
            inner.append(f"{verb}{moved}(gx{n} + {offset}, {_step(problem, x_components)}, left, gx{n}_i{i});")
    if not indexed and problem.z_outputs:
        for output in problem.z_outputs:
            inner.append(f"T* const to{output} = {problem.output(output)} + row * {coupling.dim_out}ll;")
            inner += write_z(f"to{output}", False, output)
    warp = f"(chunk - {role.role.chunk_start} + {first_warp})"
    for order, sums in enumerate(role.program.y_sums):
        inner += _transpose_sums(problem, launch, role, order, sums, sums_base, warp)
    body += _indent(inner, 2)
    emit("  }")
    if sum_name is not None:
        emit("  block_barrier();  // all partial sums of y gradients are there")
        emit(f"  {sum_name}(args, shared_memory, base, count);")
    emit("}")
    if indexed and problem.z_outputs:
        body += flush()
        body += ["if (last == args.sizes[0]) {", *_indent(zero_rows("row + 1", "args.sizes[2]"), 1), "}"]
    head = (
        f"__device__ __forceinline__ void {name}(const Args& args, unsigned char* shared_memory, int lane, int chunk, "
        "long long first, long long last) {"
    )
    return [head, *_indent(body, 1), "}"]


def _sum_positions(role: LoweredRole) -> list[str]:
    """For each group of up to 32 y components: which component this lane ends with."""
    lines = []
    for group, (size, components) in enumerate(_sum_groups(role)):
        cases = " ".join(f"local == {n} ? {j} :" for n, j in enumerate(components))
        lines.append(f"int component{group};")
        lines.append(f"{{ const int local = lane / {32 // size}; component{group} = {cases} -1; }}")
        lines.append(f"if (lane % {32 // size} != 0) component{group} = -1;")
    return lines


def _sum_groups(role: LoweredRole) -> list[tuple[int, tuple[int, ...]]]:
    """Y components in groups that one transposing sum takes: (power of two, components)."""
    groups = []
    for start in range(0, len(role.y_components), 32):
        components = role.y_components[start : start + 32]
        size = 1
        while size < len(components):
            size *= 2
        groups.append((size, components))
    return groups


def _transpose_sums(
    problem: Problem, launch: Launch, role: LoweredRole, order: int, sums: tuple[tuple[int, object], ...],
    sums_base: int, warp: str,
) -> list[str]:  # fmt: skip
    """Sum the y gradient of an edge over the lanes of this warp, into its row in shared memory."""
    names = {j: value.name for j, value in sums}  # type: ignore[attr-defined]
    width = problem.coupling.dim_in2
    lines = []
    for group, (size, components) in enumerate(_sum_groups(role)):
        values = [names[j] for j in components] + ["T(0)"] * (size - len(components))
        lines.append(f"{{ T v[{size}] = {{{', '.join(values)}}};")
        lines.append(f"  const T total = transpose_sum<{size}, 16>(v, lane);")
        row = f"(({order} * {launch.warps} + {warp}) * {launch.batch} + b) * {width}"
        lines.append(
            f"  if (component{group} >= 0) reinterpret_cast<T*>(shared_memory)[{sums_base} + {row} + component{group}]"
            " = total; }"
        )
    return lines


def render_y_sum(
    problem: Problem, launch: Launch, roles: tuple[LoweredRole, ...], name: str, base: int, first: bool
) -> list[str]:
    """The function that adds the y gradients of all warps and writes (first launch) or adds them to the result."""
    width = problem.coupling.dim_in2
    union = sorted({j for role in roles for j in role.y_components})
    lines = [
        f"__device__ __forceinline__ void {name}(const Args& args, unsigned char* shared_memory, long long base, "
        "int count) {",
        f"  for (int t = threadIdx.x; t < count * {width}; t += blockDim.x) {{",
        f"    const int b = t / {width}, j = t % {width};",
        f"    const long long edge = {'static_cast<const int*>(args.buffers[2])[base + b]' if problem.ordered else 'base + b'};",
    ]
    if problem.indexed:
        lines.append("    const bool present = static_cast<const int*>(args.buffers[0])[edge] >= 0;")
    else:
        lines.append("    const bool present = true;")
    for order, output in enumerate(problem.y_outputs):
        lines.append("    {")
        lines.append("      T sum = T(0);")
        lines.append("      if (present) {")
        warp = 0
        for role in roles:
            test = _member(role.y_components, width)
            for _ in range(role.role.chunks):
                row = f"{base} + (({order} * {launch.warps} + {warp}) * {launch.batch} + b) * {width} + j"
                lines.append(f"        if ({test}) sum += reinterpret_cast<const T*>(shared_memory)[{row}];")
                warp += 1
        lines.append("      }")
        target = f"{problem.output(output)}[edge * {width} + j]"
        lines.append(
            f"      {target} = sum;" if first else f"      if ({_member(tuple(union), width)}) {target} += sum;"
        )
        lines.append("    }")
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


def render_fix_up(problem: Problem, schedule: Schedule, groups: list[list[tuple[int, int]]], name: str) -> list[str]:
    """The kernel that adds the scratch rows of receivers cut by block boundaries, in order of edges.

    `continued` holds, for each launch, its number of blocks and then for each block the receiver it continues or -1.
    """
    width, stride = problem.coupling.dim_out, schedule.max_blocks + 1
    lines = [
        f'extern "C" __global__ void __launch_bounds__(256) {name}(const Args args) {{',
        "  const int block = blockIdx.x;",
    ]
    for number, columns in enumerate(groups):
        lines += [
            "  {",
            f"    const int* const continued = static_cast<const int*>({problem.extra(1)}) + {number * stride};",
            "    const int blocks = continued[0];",
            "    const int row = block < blocks ? continued[1 + block] : -1;",
            "    if (row >= 0 && (block == 0 || continued[block] != row)) {",
        ]
        for order, output in enumerate(problem.z_outputs):
            lines += (
                [
                    f"      T* const z = {problem.output(output)} + row * {width}ll;",
                    f"      const T* const scratch = static_cast<const T*>({problem.extra(0)}) + {order} * args.sizes[3] * {width}ll;",
                ]
                if order == 0
                else [
                    f"      T* const z{order} = {problem.output(output)} + row * {width}ll;",
                    f"      const T* const scratch{order} = static_cast<const T*>({problem.extra(0)}) + {order} * args.sizes[3] * {width}ll;",
                ]
            )
            suffix = "" if order == 0 else str(order)
            for start, length in columns:
                lines += [
                    f"      for (int c = threadIdx.x; c < {length}; c += blockDim.x) {{",
                    f"        T sum = z{suffix}[{start} + c];",
                    "        for (int h = block; h < blocks && continued[1 + h] == row; ++h)",
                    f"          sum += scratch{suffix}[h * {width}ll + {start} + c];",
                    f"        z{suffix}[{start} + c] = sum;",
                    "      }",
                ]
        lines += ["    }", "  }"]
    return [*lines, "}"]


def render_kernel(
    problem: Problem, schedule: Schedule, number: int, roles: tuple[LoweredRole, ...], name: str
) -> list[str]:
    """One launch: its role functions and the kernel that hands warps to roles."""
    launch = schedule.launches[number]
    tables = [0]
    for role in roles:
        tables.append(tables[-1] + _table_elements(problem, role, launch))
    lines: list[str] = []
    sum_name = None
    if problem.y_outputs:
        sum_name = f"{name}_sum_y"
        lines += render_y_sum(problem, launch, roles, sum_name, tables[-1], number == 0)
    sharers: dict[int, int] = {}
    for other in schedule.launches:
        for role in other.roles:
            block = problem.coupling.paths[role.paths[0]].in1_block
            sharers[block] = sharers.get(block, 0) + (1 if role.chunk_start == 0 else 0)
    warp = 0
    dispatch = []
    for n, role in enumerate(roles):
        role_name = f"{name}_role_{n}"
        exclusive = not problem.indexed and sharers[role.paths[0].in1_block] == 1
        lines += render_role(problem, launch, role, role_name, tables[n], tables[-1], warp, sum_name, exclusive)
        start = f"warp - {warp - role.role.chunk_start}" if warp != role.role.chunk_start else "warp"
        warp += role.role.chunks
        test = f"if (warp < {warp}) " if n + 1 < len(roles) else ""
        dispatch.append(f"{'else ' if n else ''}{test}{role_name}(args, shared_memory, lane, {start}, first, last);")
    lines += [
        f'extern "C" __global__ void __launch_bounds__({32 * launch.warps}, {launch.blocks_per_multiprocessor}) '
        f"{name}(const Args args) {{",
        "  extern __shared__ __align__(16) unsigned char shared_memory[];",
        "  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;",
        "  const long long edges = args.sizes[0];",
        "  const long long first = edges * blockIdx.x / gridDim.x, last = edges * (blockIdx.x + 1ll) / gridDim.x;",
    ]
    if problem.has_scratch:
        stride = schedule.max_blocks + 1
        read = "order[first]" if problem.ordered else "first"
        read_before = "order[first - 1]" if problem.ordered else "first - 1"
        lines += [
            "  if (threadIdx.x == 0) {",
            f"    int* const continued = static_cast<int*>({problem.extra(1)}) + {number * stride};",
            "    const int* const receivers = static_cast<const int*>(args.buffers[1]);",
        ]
        if problem.ordered:
            lines.append("    const int* const order = static_cast<const int*>(args.buffers[2]);")
        lines += [
            f"    const int row = receivers[{read}];",
            f"    continued[1 + blockIdx.x] = first > 0 && receivers[{read_before}] == row ? row : -1;",
            "    if (blockIdx.x == 0) continued[0] = gridDim.x;",
            "  }",
        ]
    lines += ["  (void)warp;", *_indent(dispatch, 1), "}"]
    return lines
