"""The XLA path: evaluate a term set with plain jnp, on any platform and for every instruction mode.

Rows (edges) go through in blocks of fixed size, so that temporaries stay bounded whatever the number of edges;
within a block each path is contracted on its own, never the outer product of x and y. Derivatives need nothing
here: the primitive differentiates term sets (`_terms`), and this module only evaluates them.

The module is the oracle of all kernel tests, itself checked against e3nn-jax.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxcg._coupling import Coupling, Path
from jaxcg._jax_internals import unfused
from jaxcg._terms import SLOTS, TermSet

# Elements of the widest operand of a block: 16 MB in float32. A compromise that was not tuned: smaller blocks pay XLA's
# loop overhead more often, larger ones leave a CPU's last-level cache.
BLOCK_ELEMENTS = 1 << 22

# einsum letters of each mode, b = row: x[b,mul,i], y[b,mul,j], w[b,...], z[b,mul...,k].
_LETTERS = {
    "uvw": ("ui", "vj", "uvw", "wk"),
    "uvu": ("ui", "vj", "uv", "uk"),
    "uvv": ("ui", "vj", "uv", "vk"),
    "uuw": ("ui", "uj", "uw", "wk"),
    "uuu": ("ui", "uj", "u", "uk"),
    "uvuv": ("ui", "vj", "uv", "uvk"),
}


@lru_cache(maxsize=1024)
def dense_coefficients(path: Path) -> np.ndarray:
    """Coupling coefficients of one path as a dense array ``[2*l1+1, 2*l2+1, 2*l3+1]``, float64."""
    dense = np.zeros((2 * path.l1 + 1, 2 * path.l2 + 1, 2 * path.l3 + 1))
    for i, j, k, value in path.entries:
        dense[i, j, k] = value
    return dense


def _einsum(spec: str, *operands: Array, optimize: str | bool = True) -> Array:
    """An einsum in the precision of its operands: on a GPU, JAX's default would round float32 factors to 10 bits.

    `jax.default_matmul_precision` still decides where a user has set it.
    """
    chosen = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    precision = jax.lax.Precision.HIGHEST if chosen is None else None
    return jnp.einsum(spec, *operands, optimize=optimize, precision=precision)


def _split(row: Float[Array, "b dim"], offset: int, mul: int, degree: int, layout: str) -> Float[Array, "b mul m"]:
    """One irreps block of a row as [row, channel, component]."""
    flat = row[:, offset : offset + mul * (2 * degree + 1)]
    if layout == "ir_mul":
        return flat.reshape(-1, 2 * degree + 1, mul).swapaxes(1, 2)
    return flat.reshape(-1, mul, 2 * degree + 1)


def _join(block: Float[Array, "b mul m"], layout: str) -> Float[Array, "b dim"]:
    return (block.swapaxes(1, 2) if layout == "ir_mul" else block).reshape(block.shape[0], -1)


class _Pieces:
    """Parts of an output row, added where they overlap and concatenated at the end; gaps are zero."""

    def __init__(self, rows: int, dim: int, dtype: jnp.dtype) -> None:
        self.rows, self.dim, self.dtype = rows, dim, dtype
        self.parts: dict[int, Array] = {}
        self.whole: list[Array] = []

    def add(self, offset: int, part: Float[Array, "b n"]) -> None:
        held = self.parts.get(offset)
        self.parts[offset] = part if held is None else held + part

    def add_row(self, part: Float[Array, "b dim"]) -> None:
        self.whole.append(part)

    def row(self) -> Float[Array, "b dim"]:
        if self.whole and not self.parts:
            return sum(self.whole[1:], self.whole[0])
        filled, at = [], 0
        for offset in sorted(self.parts):
            if offset > at:
                filled.append(jnp.zeros((self.rows, offset - at), self.dtype))
            filled.append(self.parts[offset])
            at = offset + self.parts[offset].shape[1]
        if at < self.dim or not filled:
            filled.append(jnp.zeros((self.rows, self.dim - at), self.dtype))
        row = jnp.concatenate(filled, axis=1) if len(filled) > 1 else filled[0]
        return sum(self.whole, row)


def _channelwise_groups(coupling: Coupling) -> tuple[list[tuple[Path, ...]], list[Path]]:
    """Paths that share an x block and multiply one y row (mul2 = 1, 'uvu'), and the rest one by one."""
    groups: dict[int, list[Path]] = {}
    rest: list[Path] = []
    for path in coupling.paths:
        if path.mode == "uvu" and path.mul2 == 1:
            groups.setdefault(path.in1_block, []).append(path)
        else:
            rest.append(path)
    return [tuple(paths) for paths in groups.values()], rest


def _add_path(
    path: Path,
    coupling: Coupling,
    terms: TermSet,
    operands: Sequence[Array],
    rows: int,
    pieces: Sequence[_Pieces],
    fresh: Bool[Array, " b"] | None,
) -> None:
    """Add one path of any mode to the outputs, one einsum a term."""
    letters: dict[str, str] = dict(zip(SLOTS, _LETTERS[path.mode], strict=True))
    dtype = operands[0].dtype
    constant = jnp.asarray(dense_coefficients(path), dtype)
    layout = coupling.layout
    offsets = {"x": path.in1_offset, "y": path.in2_offset, "w": path.weight_offset, "z": path.out_offset}
    out_muls = (path.mul1, path.mul2) if path.mode == "uvuv" else (path.mul_out,)
    muls = {"u": path.mul1, "v": path.mul2, "w": path.mul_out}

    def view(slot: str, value: Array) -> tuple[Array, str]:
        shared = "" if slot == "w" and value.ndim == 1 else "b"
        if slot == "w":
            start = offsets["w"] or 0
            part = value[..., start : start + math.prod(path.weight_shape)]
            return part.reshape(*value.shape[:-1], *path.weight_shape), shared + letters["w"]
        if slot == "x":
            return _split(value, path.in1_offset, path.mul1, path.l1, layout), "b" + letters["x"]
        if slot == "y":
            return _split(value, path.in2_offset, path.mul2, path.l2, "mul_ir"), "b" + letters["y"]
        part = _split(value, path.out_offset, math.prod(out_muls), path.l3, layout)
        return part.reshape(rows, *out_muls, 2 * path.l3 + 1), "b" + letters["z"]

    for out, piece in zip(terms.outputs, pieces, strict=True):
        for term in out.terms:
            views = [view(slot, operands[number]) for slot in SLOTS if (number := term[slot]) is not None]
            shared_sum = out.slot == "w" and piece.rows == 1
            target = ("" if shared_sum else "b") + letters[out.slot]
            if shared_sum and fresh is not None:
                views.append((fresh.astype(dtype), "b"))
            # Without weights, a channel of the open slot may appear in no factor: all its entries are alike.
            held = "".join(spec for _, spec in views)
            missing = [letter for letter in target if letter in muls and letter not in held]
            if missing:
                views.append((jnp.ones([muls[letter] for letter in missing], dtype), "".join(missing)))
            spec = ",".join([spec for _, spec in views] + ["ijk"]) + "->" + target
            value = unfused(_einsum(spec, *(v for v, _ in views), constant, optimize="optimal"))
            if out.slot == "w":
                piece.add(offsets["w"] or 0, value.reshape(piece.rows, -1))
            elif out.slot == "y":
                piece.add(path.in2_offset, value.reshape(rows, -1))
            else:
                mul = path.mul1 if out.slot == "x" else math.prod(out_muls)
                value = value.reshape(rows, mul, -1)
                piece.add(path.in1_offset if out.slot == "x" else path.out_offset, _join(value, layout))


def _add_group(
    group: tuple[Path, ...],
    coupling: Coupling,
    terms: TermSet,
    operands: Sequence[Array],
    rows: int,
    pieces: Sequence[_Pieces],
    fresh: Bool[Array, " b"] | None,
) -> None:
    """Add all channelwise paths of one x block, their output components side by side on one axis K.

    With M[i,K] = sum_j C_ijK y_j the product is z[u,K] = w[u,K] sum_i x[u,i] M[i,K]: two small batched matrix
    products for all paths together instead of one einsum a path, and each factor is made once for all terms.
    """
    first, layout, dtype = group[0], coupling.layout, operands[0].dtype
    dims = [2 * path.l3 + 1 for path in group]
    path_of = np.repeat(np.arange(len(group)), dims)
    dense = np.zeros((coupling.dim_in2, 2 * first.l1 + 1, sum(dims)))
    start = 0
    for path, dim in zip(group, dims, strict=True):
        block = dense_coefficients(path).swapaxes(0, 1)
        dense[path.in2_offset : path.in2_offset + 2 * path.l2 + 1, :, start : start + dim] += block
        start += dim
    constant = jnp.asarray(dense, dtype)
    made: dict[tuple[str, int | None, int | None], Array] = {}

    def once(kind: str, a: int | None, b: int | None) -> Array:
        if (kind, a, b) not in made:
            made[kind, a, b] = make[kind](a, b)
        return made[kind, a, b]

    def weights(number: int | None, _: None) -> Array:
        """w[b,u,P], b = 1 when shared; 1 without weights."""
        if number is None:
            return jnp.ones((1, 1, len(group)), dtype)
        value = operands[number]
        value = value[None] if value.ndim == 1 else value
        starts = [path.weight_offset or 0 for path in group]
        return jnp.stack([value[:, start : start + first.mul1] for start in starts], axis=2)

    make = {
        "x": lambda n, _: _split(operands[n], first.in1_offset, first.mul1, first.l1, layout),
        "m": lambda n, _: _einsum("bj,jiK->biK", operands[n], constant),
        "w": weights,
        "z": lambda n, _: jnp.concatenate(
            [_split(operands[n], p.out_offset, p.mul1, p.l3, layout) for p in group], axis=2
        ),
        "xm": lambda x, y: _einsum("bui,biK->buK", once("x", x, None), once("m", y, None)),
        "wz": lambda w, z: once("w", w, None)[:, :, path_of] * once("z", z, None),
    }
    for out, piece in zip(terms.outputs, pieces, strict=True):
        if not out.terms:
            continue
        if out.slot == "z":
            total = sum(once("w", t.w, None)[:, :, path_of] * once("xm", t.x, t.y) for t in out.terms)
            for path, part in zip(group, jnp.split(total, np.cumsum(dims)[:-1], axis=2), strict=True):
                piece.add(path.out_offset, _join(part, layout))
        elif out.slot == "x":
            parts = [_einsum("buK,biK->bui", once("wz", t.w, t.z), once("m", t.y, None)) for t in out.terms]
            piece.add(first.in1_offset, _join(sum(parts[1:], parts[0]), layout))
        elif out.slot == "y":
            pairs = [(once("x", t.x, None), once("wz", t.w, t.z)) for t in out.terms]
            parts = [_einsum("bui,buK->biK", x, wz) for x, wz in pairs]
            piece.add_row(_einsum("biK,jiK->bj", sum(parts[1:], parts[0]), constant))
        else:
            total = sum(once("xm", t.x, t.y) * once("z", t.z, None) for t in out.terms)
            for path, part in zip(group, jnp.split(total, np.cumsum(dims)[:-1], axis=2), strict=True):
                value = part.sum(axis=2)
                if piece.rows == 1:
                    value = value if fresh is None else jnp.where(fresh[:, None], value, 0)
                    value = value.sum(0, keepdims=True)
                piece.add(path.weight_offset or 0, value)


def evaluate_rows(
    coupling: Coupling,
    terms: TermSet,
    operands: Sequence[Array],
    rows: int,
    shared: bool,
    fresh: Bool[Array, " b"] | None = None,
) -> list[Float[Array, "b dim"]]:
    """Evaluate a term set row by row, all operands already gathered to rows.

    Args:
        coupling: the resolved product.
        terms: what to compute.
        operands: one array for each operand, ``[rows, dim]``; weights ``[weight_numel]`` when shared.
        rows: number of rows.
        shared: whether all rows share one weight vector; an open `w` is then summed over rows, ``[1, weight_numel]``.
        fresh: rows that this sum counts; None for all.

    Returns:
        One array of rows for each output.
    """
    dims = {"x": coupling.dim_in1, "y": coupling.dim_in2, "w": coupling.weight_numel, "z": coupling.dim_out}
    dtype = operands[0].dtype
    pieces = [_Pieces(1 if shared and out.slot == "w" else rows, dims[out.slot], dtype) for out in terms.outputs]
    groups, rest = _channelwise_groups(coupling)
    for group in groups:
        _add_group(group, coupling, terms, operands, rows, pieces, fresh)
    for path in rest:
        _add_path(path, coupling, terms, operands, rows, pieces, fresh)
    return [piece.row() for piece in pieces]


def block_rows(coupling: Coupling) -> int:
    """Rows in a block: as many as keep the widest operand within `BLOCK_ELEMENTS`."""
    widest = max(coupling.dim_in1, coupling.dim_out, coupling.weight_numel, coupling.dim_in2, 1)
    return max(64, BLOCK_ELEMENTS // widest)


# A sum so far, and what must still be added to it if it is compensated.
_Total = tuple[Array, ...]


def _add(total: _Total, index: Int[Array, " b"], rows: Float[Array, "b dim"]) -> _Total:
    """Add rows to rows of a sum."""
    return (total[0].at[index].add(rows, mode="drop"),)


def _add_compensated(total: _Total, index: Int[Array, " b"], rows: Float[Array, "b dim"]) -> _Total:
    """The same, with what rounding takes from the sum kept beside it.

    The rows of a receiver are cut at the last bits of a number above the sum of their magnitudes, so that the sum of
    the upper parts is exact in any order (Demmel and Nguyen, "Fast reproducible floating-point summation", 2013); the
    lower parts, smaller by eps times their number, are added up as they are. Then the exact sum is added to the total
    by Knuth's error-free transformation (Ogita, Rump and Oishi, "Accurate sum and dot product", 2005, algorithm 4.3).
    """
    held, lost = total
    size = rows.shape[0]
    # Receivers of this block, numbered: work and memory are those of the block, however many nodes there are.
    order = jnp.argsort(index)
    index, rows = index[order], rows[order]
    number = jnp.cumsum(jnp.concatenate([jnp.zeros(1, bool), index[1:] != index[:-1]]))
    to = jnp.full(size, held.shape[0], index.dtype).at[number].set(index)  # past the end: no receiver of this number
    counts = jnp.zeros((size, 1), rows.dtype).at[number].add(1)
    largest = jnp.zeros_like(rows).at[number].max(jnp.abs(rows))
    cut = 4 * counts * jnp.exp2(jnp.ceil(jnp.log2(jnp.maximum(largest, jnp.finfo(rows.dtype).tiny))))
    fits, cut = jnp.isfinite(cut)[number], cut[number]
    upper = jnp.where(fits, (cut + rows) - cut, rows)
    lower = jnp.where(fits, rows - upper, 0)
    # XLA turns the sum of an array and a scatter onto zeros into a scatter onto the array, if it may.
    added, rest = jax.lax.optimization_barrier(
        tuple(jnp.zeros_like(rows).at[number].add(part) for part in (upper, lower))
    )
    old = jnp.take(held, to, axis=0, mode="clip")
    new = old + added
    of_added = new - old
    error = (old - (new - of_added)) + (added - of_added)
    error = jnp.where(jnp.isfinite(new), error, 0)
    return held.at[to].set(new, mode="drop"), lost.at[to].add(error + rest, mode="drop")


def evaluate(
    coupling: Coupling,
    terms: TermSet,
    senders: Int[Array, " e"] | None,
    receivers: Int[Array, " e"] | None,
    operands: Sequence[Array],
    *,
    num_rows: int,
    num_x: int,
    num_z: int,
    shared: bool,
    compensated: bool = False,
) -> list[Array]:
    """Evaluate a term set over all rows, in blocks under a loop.

    Args:
        coupling: the resolved product.
        terms: what to compute.
        senders: row of the x slot for each edge, for an absent edge the complement of one; None: edge e uses row e.
        receivers: row of the z slot for each edge, in range; None likewise.
        operands: x operands ``[num_x, dim_in1]``, y ``[num_rows, dim_in2]``, w ``[num_rows, weight_numel]`` or
            ``[weight_numel]``, z ``[num_z, dim_out]``.
        num_rows: number of edges.
        num_x: number of rows of the x slot.
        num_z: number of rows of the z slot.
        shared: whether the weights are shared by all rows.
        compensated: whether sums over edges carry along what rounding takes from them.

    Returns:
        One array for each output, shaped like an operand of its slot.
    """
    dtype = operands[0].dtype
    size = min(block_rows(coupling), num_rows)
    dims = {"x": coupling.dim_in1, "y": coupling.dim_in2, "w": coupling.weight_numel, "z": coupling.dim_out}
    heights = {"x": num_x, "y": num_rows, "w": num_rows, "z": num_z}
    indices = {"x": senders, "z": receivers}

    def one_block(start: Int[Array, ""] | int, totals: list[_Total], fresh: Bool[Array, " b"] | None) -> list[_Total]:
        whole = size == num_rows

        def cut(array: Array) -> Array:
            return array if whole else jax.lax.dynamic_slice_in_dim(array, start, size)

        present = None if senders is None else cut(senders) >= 0
        rows_of = {slot: None if index is None else jnp.maximum(cut(index), 0) for slot, index in indices.items()}

        def gather(slot: str, array: Array) -> Array:
            if slot == "w" and shared:
                return array
            index = rows_of.get(slot)
            rows = cut(array) if index is None else jnp.take(array, index, axis=0, mode="clip")
            # An absent edge adds nothing even if its operands are NaN: select zeros before any arithmetic.
            return rows if present is None else jnp.where(present[:, None], rows, 0)

        gathered = [gather(slot, array) for slot, array in zip(terms.operands, operands, strict=True)]
        updated = []
        for out, rows, total in zip(
            terms.outputs, evaluate_rows(coupling, terms, gathered, size, shared, fresh), totals, strict=True
        ):
            index = rows_of.get(out.slot)
            if out.slot == "w" and shared:
                updated.append((total[0] + rows[0],))
            elif index is not None:
                rows = rows if fresh is None else jnp.where(fresh[:, None], rows, 0)
                add = _add_compensated if compensated else _add
                updated.append(add(total, index, rows))
            elif whole:
                updated.append((rows,))
            else:
                updated.append((jax.lax.dynamic_update_slice_in_dim(total[0], rows, start, 0),))
        return updated

    totals: list[_Total] = []
    for out in terms.outputs:
        zero = jnp.zeros((dims["w"],) if out.slot == "w" and shared else (heights[out.slot], dims[out.slot]), dtype)
        totals.append((zero, zero) if compensated and indices.get(out.slot) is not None else (zero,))
    if size == num_rows:
        return [sum(total[1:], total[0]) for total in one_block(0, totals, None)]

    def body(number: Int[Array, ""], totals: list[_Total]) -> list[_Total]:
        # The last block is moved back to stay inside; rows that an earlier block did are not added again.
        start = jnp.minimum(number * size, num_rows - size)
        fresh = start + jnp.arange(size) >= number * size
        return one_block(start, totals, fresh)

    totals = jax.lax.fori_loop(0, -(-num_rows // size), body, totals)
    return [sum(total[1:], total[0]) for total in totals]
