"""From the terms of a role to its program: which products an edge needs, each made once.

With M_d[i,k] = sum_j C_ijk y_d[j] for each y operand d, made once for each edge and shared by all channels:

    z open:  z[k]  += sum_d M_d[i,k] S_d[i]             S_d[i] = sum of w_b x_a[i] over the terms with y_d
    x open:  gx[i] += w_b H_dc[i]                       H_dc[i] = sum_k M_d[i,k] z_c[k]
    w open:  gw    += x_a[i] H_dc[i]
    y open:  gy[j] += sum_k C_ijk s[i,k]                s[i,k] = sum over channels of A_c[i] z_c[k],
                                                        A_c[i] = sum of w_b x_a[i] over the terms with z_c
"""

from dataclasses import dataclass

from jaxcg._coupling import Coupling, Path
from jaxcg._terms import Term, TermSet
from jaxcg.codegen.ir import LANES, SCALAR, Builder, Program, Value
from jaxcg.schedule import Role
from jaxcg.schedule.cost import Columns, distinct_columns, y_components


@dataclass(frozen=True)
class Entry:
    """One entry of M: a linear combination of y components.

    Attributes:
        column: (component of the y row, coefficient) pairs.
    """

    column: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class LoweredRole:
    """A role ready to be rendered.

    Attributes:
        role: where it runs.
        paths: its paths.
        entries: M of an edge for one y operand, padded to whole quads of each path with None.
        program: the work on one edge.
        z_outputs: for each z output, the accumulator of each (path number in the role, component).
        lost: what rounding has taken from these accumulators; empty if nobody asks.
        z_operands: for each z operand, its value of each (path number, component).
        y_components: components of y that a gradient of y gets from this role.
    """

    role: Role
    paths: tuple[Path, ...]
    entries: tuple[Entry | None, ...]
    program: Program
    z_outputs: tuple[tuple[int, tuple[tuple[int, int, Value], ...]], ...]
    z_operands: tuple[tuple[int, tuple[tuple[int, int, Value], ...]], ...]
    lost: tuple[Value, ...]
    y_components: tuple[int, ...]


def _table(paths: tuple[Path, ...]) -> tuple[list[Columns], list[int], tuple[Entry | None, ...]]:
    """Lay out M: the distinct columns of each path, each path starting on a quad."""
    columns = [distinct_columns(path) for path in paths]
    starts: list[int] = []
    entries: list[Entry | None] = []
    for path, found in zip(paths, columns, strict=True):
        starts.append(len(entries))
        entries += [Entry(tuple((path.in2_offset + j, c) for j, c in column)) for column in found.columns]
        entries += [None] * (-len(entries) % 4)
    return columns, starts, tuple(entries)


class _Factors:
    """Products of one row i of one path, each emitted when first asked for."""

    def __init__(
        self, builder: Builder, x: dict[int, Value], w: dict[int, Value], m: dict[tuple[int, int], tuple[Value, int]],
        z: dict[tuple[int, int], Value], components: list[int],
    ) -> None:  # fmt: skip
        self.builder, self.x, self.w, self.m, self.z, self.components = builder, x, w, m, z, components
        self.made: dict[tuple, Value] = {}

    def scaled(self, terms: list[Term]) -> Value:
        """Sum of w x over terms; the x itself when there is one term without weight."""
        pairs = tuple(sorted(((t.x, t.w) for t in terms if t.x is not None), key=str))
        if pairs not in self.made:
            (x, w), *rest = pairs
            first = self.x[x] if w is None else self.builder.define("s", "multiply", self.w[w], self.x[x])
            if rest and w is None:
                total = self.builder.define("s", "zero_lanes")
                self.builder.emit("add", total, first)
                first = total
            for x, w in rest:
                if w is None:
                    self.builder.emit("add", first, self.x[x])
                else:
                    self.builder.emit("fma", first, self.w[w], self.x[x])
            self.made[pairs] = first
        return self.made[pairs]

    def contracted(self, y: int, z: int) -> Value:
        """H[i] = sum_k M_y[i,k] z[k]."""
        if (y, z) not in self.made:
            total: Value | None = None
            for k in self.components:
                entry, sign = self.m[y, k]
                if total is None:
                    total = self.builder.define("h", "scale", entry, self.z[z, k], number=sign)
                else:
                    self.builder.emit("fma_scalar", total, entry, self.z[z, k], number=sign)
            assert total is not None
            self.made[y, z] = total
        return self.made[y, z]


def _group(terms: tuple[Term, ...], slot: str) -> dict[int, list[Term]]:
    groups: dict[int, list[Term]] = {}
    for term in terms:
        number = term[slot]
        assert number is not None
        groups.setdefault(number, []).append(term)
    return groups


def lower_role(coupling: Coupling, terms: TermSet, role: Role, compensated: bool = False) -> LoweredRole:
    """Lower one role.

    Args:
        coupling: the product, every path channelwise with a slot of its own.
        terms: what to compute.
        role: the paths, all of one x block.
        compensated: whether sums over edges carry what rounding takes from them.

    Returns:
        The program of an edge, with the table of M that it reads.
    """
    paths = tuple(coupling.paths[p] for p in role.paths)
    columns, starts, entries = _table(paths)
    numbers = {slot: [n for n, s in enumerate(terms.operands) if s == slot] for slot in "xywz"}
    outputs = {slot: [n for n, out in enumerate(terms.outputs) if out.slot == slot] for slot in "xywz"}
    rows = 2 * paths[0].l1 + 1
    components = y_components(paths)

    places = [(n, k) for n, path in enumerate(paths) for k in range(2 * path.l3 + 1)]
    z_in = {(o, n, k): Value(f"z{o}_p{n}_k{k}", LANES) for o in numbers["z"] for n, k in places}
    z_out = {(o, n, k): Value(f"acc{o}_p{n}_k{k}", LANES) for o in outputs["z"] for n, k in places}
    lost = {place: Value(value.name.replace("acc", "lost"), LANES) for place, value in z_out.items() if compensated}
    x_out = {(o, i): Value(f"gx{o}_i{i}", LANES) for o in outputs["x"] for i in range(rows)}
    x_in = {(o, i): Value(f"x{o}_i{i}", LANES) for o in numbers["x"] for i in range(rows)}
    y_out = {(o, j): Value(f"gy{o}_j{j}", SCALAR) for o in outputs["y"] for j in components}
    builder = Builder()
    for n, path in enumerate(paths):
        comment = (
            f"path {path.index}: l = {path.l1} x {path.l2} -> {path.l3}, {path.mul1} channels, "
            f"{len(path.entries)} coefficients"
        )
        with builder.block(comment):
            _lower_path(builder, terms, n, path, columns[n], starts[n], x_in, z_in, z_out, lost, x_out, y_out)
    program = Program(
        inputs=tuple(value for table in (x_in, z_in, z_out, lost, x_out, y_out) for value in table.values()),
        blocks=tuple(builder.blocks),
        y_sums=tuple(tuple((j, y_out[o, j]) for j in components) for o in outputs["y"]),
    )
    gather = lambda table, o: tuple((n, k, table[o, n, k]) for n, k in places)  # noqa: E731
    return LoweredRole(
        role=role,
        paths=paths,
        entries=entries,
        program=program,
        z_outputs=tuple((o, gather(z_out, o)) for o in outputs["z"]),
        z_operands=tuple((o, gather(z_in, o)) for o in numbers["z"]),
        lost=tuple(lost.values()),
        y_components=components if outputs["y"] else (),
    )


def _lower_path(
    builder: Builder,
    terms: TermSet,
    n: int,
    path: Path,
    columns: Columns,
    start: int,
    x_in: dict[tuple[int, int], Value],
    z_in: dict[tuple[int, int, int], Value],
    z_out: dict[tuple[int, int, int], Value],
    lost: dict[tuple[int, int, int], Value],
    x_out: dict[tuple[int, int], Value],
    y_out: dict[tuple[int, int], Value],
) -> None:
    """Emit all terms of one path."""
    operands = {slot: [o for o, s in enumerate(terms.operands) if s == slot] for slot in "xywz"}
    w = {o: builder.define(f"w{o}", "load_w", at=(o, n)) for o in operands["w"]}

    outputs = [(o, out.slot, out.terms) for o, out in enumerate(terms.outputs)]
    w_out = {o: builder.define(f"gw{o}", "zero_lanes") for o, slot, _ in outputs if slot == "w"}
    # Where an edge adds to z: the accumulators, or a sum of its own that is added to them afterwards.
    sums = {
        place: builder.define("message", "zero_lanes") if lost else value
        for place, value in z_out.items()
        if place[1] == n
    }
    reads_m = any(slot != "y" for _, slot, _ in outputs)
    m = {
        (o, c): builder.define(f"m{o}", "load_m", at=(o, start + c))
        for o in operands["y"]
        for c in range(len(columns.columns))
        if reads_m
    }
    by_row: dict[int, list[tuple[int, int, float]]] = {}
    for i, j, k, value in path.entries:
        by_row.setdefault(i, []).append((j, k, value))
    for i, found in sorted(by_row.items()):
        ks = sorted({k for _, k, _ in found})
        factors = _Factors(
            builder,
            x={o: x_in[o, i] for o in operands["x"]},
            w=w,
            m={
                (o, k): (m[o, columns.place[i, k][0]], columns.place[i, k][1])
                for o in operands["y"]
                for k in ks
                if reads_m
            },
            z={(o, k): z_in[o, n, k] for o in operands["z"] for k in ks},
            components=ks,
        )
        for o, slot, found_terms in outputs:
            if slot == "z":
                for y, group in _group(found_terms, "y").items():
                    scaled = factors.scaled(group)
                    for k in ks:
                        entry, sign = factors.m[y, k]
                        builder.emit("fma_scalar", sums[o, n, k], entry, scaled, number=sign)
            elif slot == "x":
                for t in found_terms:
                    assert t.y is not None and t.z is not None
                    contracted = factors.contracted(t.y, t.z)
                    if t.w is None:
                        builder.emit("add", x_out[o, i], contracted)
                    else:
                        builder.emit("fma", x_out[o, i], w[t.w], contracted)
            elif slot == "w":
                for t in found_terms:
                    assert t.x is not None and t.y is not None and t.z is not None
                    builder.emit("fma", w_out[o], factors.x[t.x], factors.contracted(t.y, t.z))
            elif slot == "y":
                dots = {k: builder.define("t", "zero_scalar") for k in ks}
                for z, group in _group(found_terms, "z").items():
                    scaled = factors.scaled(group)
                    for k in ks:
                        builder.emit("dot", dots[k], scaled, factors.z[z, k])
                for j, k, value in found:
                    builder.emit("axpy", y_out[o, path.in2_offset + j], dots[k], number=value)
    if lost:
        for place, message in sums.items():
            builder.emit("add_compensated", z_out[place], message, lost[place])
    for o, value in w_out.items():
        builder.emit("store_w", None, value, at=(o, n))
