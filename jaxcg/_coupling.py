"""From a product to its coefficients: the sorted nonzeros of c_p C^p_ijk, in float64, for each path."""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache
from itertools import product
from math import factorial, fsum, prod, sqrt

from ._instructions import MODES
from ._irreps import blocks
from ._problem import TensorProduct

Entry = tuple[int, int, int, float]


@dataclass(frozen=True)
class Path:
    """One path of a product, with offsets in elements of a row.

    Attributes:
        index: number of the instruction.
        mode: how multiplicities are connected.
        mul1, mul2, mul_out: multiplicities of the three blocks.
        l1, l2, l3: their degrees.
        in1_block: number of the block of the first operand.
        in1_offset, in2_offset, out_offset: where the blocks begin in a row of x, y and z.
        weight_offset: where the weights of the path begin; None without weights.
        weight_shape: their shape; ``()`` without weights.
        entries: (i, j, k, coefficient), sorted; normalisation included.
    """

    index: int
    mode: str
    mul1: int
    mul2: int
    mul_out: int
    l1: int
    l2: int
    l3: int
    in1_block: int
    in1_offset: int
    in2_offset: int
    out_offset: int
    weight_offset: int | None
    weight_shape: tuple[int, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Coupling:
    """All paths of a product that contribute, with the sizes of a row of each operand."""

    paths: tuple[Path, ...]
    dim_in1: int
    dim_in2: int
    dim_out: int
    weight_numel: int
    layout: str


def exchange(coupling: Coupling) -> Coupling:
    """The coupling with the roles of x and z exchanged: C_kji where there was C_ijk.

    Every path of `coupling` has a slot of z of its own, which becomes a block of x; its result, a gradient of the x
    block that it read, gets a slot of its own, in the order of the paths.
    """
    paths: list[Path] = []
    at = 0
    for number, path in enumerate(coupling.paths):
        paths.append(
            replace(
                path,
                mul1=path.mul_out,
                mul_out=path.mul1,
                l1=path.l3,
                l3=path.l1,
                in1_block=number,
                in1_offset=path.out_offset,
                out_offset=at,
                entries=tuple(sorted((k, j, i, value) for i, j, k, value in path.entries)),
            )
        )
        at += path.mul1 * (2 * path.l1 + 1)
    return replace(coupling, paths=tuple(paths), dim_in1=coupling.dim_out, dim_out=at)


def _triangle(a: int, b: int, c: int) -> Fraction:
    return Fraction(factorial(a + b - c) * factorial(a - b + c) * factorial(b + c - a), factorial(a + b + c + 1))


def _complex_coefficient(l1: int, m1: int, l2: int, m2: int, l3: int, m3: int) -> tuple[int, Fraction]:
    """Sign and square of <l1 m1 l2 m2 | l3 m3> / sqrt(2 l3 + 1), exactly, by Racah's formula."""
    if m1 + m2 != m3 or abs(m3) > l3:
        return 0, Fraction(0)
    total = Fraction(0)
    for t in range(max(0, l2 - l3 - m1, l1 - l3 + m2), min(l1 + l2 - l3, l1 - m1, l2 + m2) + 1):
        denominator = prod(
            map(factorial, (t, l1 + l2 - l3 - t, l1 - m1 - t, l2 + m2 - t, l3 - l2 + m1 + t, l3 - l1 - m2 + t))
        )
        total += Fraction((-1) ** t, denominator)
    factorials = prod(factorial(a + b) * factorial(a - b) for a, b in ((l1, m1), (l2, m2), (l3, m3)))
    return (total > 0) - (total < 0), total * total * _triangle(l1, l2, l3) * factorials


def _real_to_complex(m: int) -> tuple[tuple[int, complex, int], ...]:
    """The real harmonic m as (complex m', phase, n): sum of phase * 2**(-n/2) * Y_m'."""
    if m == 0:
        return ((0, 1, 0),)
    if m > 0:
        return ((m, (-1) ** m, 1), (-m, 1, 1))
    return ((-m, 1j * (-1) ** m, 1), (m, -1j, 1))


@cache
def clebsch_gordan(l1: int, l2: int, l3: int) -> tuple[tuple[int, int, int, int, Fraction], ...]:
    r"""Nonzeros (i, j, k, sign, square) of the real Clebsch-Gordan coefficients, those of `e3nn_jax.clebsch_gordan`.

    Normalised to $\sum_{ijk} C_{ijk}^2 = 1$, components m = -l..l.

    Every real coefficient is plus or minus the square root of a rational number: the complex coefficients that meet in
    one have equal squares (m -> -m changes the sign at most). So squares are exact, and a coefficient with its
    normalisation is rounded once: entries that are equal up to sign are so to the last bit, which the code generator
    uses to share products, and a path through l = 0 has the entry 1.

    >>> clebsch_gordan(1, 1, 0)[0]
    (0, 0, 0, 1, Fraction(1, 3))
    """
    entries: list[tuple[int, int, int, int, Fraction]] = []
    # The factors (-i)^l make the coefficients real.
    global_phase = (-1j) ** l1 * (-1j) ** l2 * (1j) ** l3
    ranges = (range(-l1, l1 + 1), range(-l2, l2 + 1), range(-l3, l3 + 1))
    for m1, m2, m3 in product(*ranges):
        if abs(m3) not in (abs(m1 + m2), abs(m1 - m2)):
            continue
        phase_sum, square = 0j, Fraction(0)
        terms = product(_real_to_complex(m1), _real_to_complex(m2), _real_to_complex(m3))
        for (c1, p1, n1), (c2, p2, n2), (c3, p3, n3) in terms:
            sign, size = _complex_coefficient(l1, c1, l2, c2, l3, c3)
            if sign:
                phase_sum += sign * p1 * p2 * complex(p3).conjugate()
                square = size / 2 ** (n1 + n2 + n3)
        value = phase_sum * global_phase
        if value.real:
            sign = 1 if value.real > 0 else -1
            entries.append((m1 + l1, m2 + l2, m3 + l3, sign, square * round(value.real) ** 2))
    return tuple(sorted(entries))


def normalisation(tp: TensorProduct) -> tuple[Fraction, ...]:
    r"""The square of the normalisation c_p of each instruction: e3nn's with weights of unit variance.

    $$c_p^2 = a_p s_p / (n_p^q \sum_{p'} n_{p'}^{1-q})$$

    with a_p the irrep normalisation (``component``: 2 l3 + 1; ``norm``: (2 l1 + 1)(2 l2 + 1)), s_p the path weight,
    n_p the number of products that one output element sums, q = 0 (element) to 1 (path), and p' over the paths into the
    same block. Instructions that touch a block of multiplicity 0 have 0 and no part in the sum.
    """
    exponent = tp.path_normalization
    if isinstance(exponent, str):
        exponent = {"element": 0.0, "path": 1.0}[exponent]
    active = tp.active_instructions()
    summands: dict[int, int] = {}
    into: dict[int, list[float]] = {}
    for number in active:
        i_out, mode = tp.instructions[number][2:4]
        mul1, mul2, _ = tp.multiplicities(number)
        summands[number] = MODES[mode].summands(mul1, mul2)
        into.setdefault(i_out, []).append(summands[number] ** (1.0 - exponent))
    squares = [Fraction(0)] * len(tp.instructions)
    in1, in2, out = blocks(tp.irreps_in1), blocks(tp.irreps_in2), blocks(tp.irreps_out)
    for number in active:
        i1, i2, i_out, _, _, path_weight = tp.instructions[number]
        if tp.irrep_normalization == "component":
            size = out[i_out][1].dim
        elif tp.irrep_normalization == "norm":
            size = in1[i1][1].dim * in2[i2][1].dim
        else:
            size = 1
        share = summands[number] ** exponent * fsum(into[i_out])
        squares[number] = size * Fraction(path_weight) / Fraction(share)
    return tuple(squares)


@lru_cache(maxsize=1024)
def couple(tp: TensorProduct, expanded: bool = False, swapped: bool = False) -> Coupling:
    """The coefficients of a product, path by path.

    Args:
        tp: the product.
        expanded: give every path an output slot of its own, in instruction order, instead of the block it shares.
        swapped: exchange the operands of a product whose instructions are all uvv: in1 and in2 change roles, C_ijk
            becomes C_jik and the mode uvu, with the same normalisation. The order of the weights does not change when
            the first operand has multiplicity 1.

    Returns:
        `Coupling`, without paths that touch a block of multiplicity 0 or have no nonzero coefficient.

    >>> len(couple(TensorProduct.channelwise("4x0e+4x1o", "0e+1o")).paths)
    6
    """
    offsets = [[block.start for block in irreps.slices()] for irreps in (tp.irreps_in1, tp.irreps_in2, tp.irreps_out)]
    in1, in2, out = blocks(tp.irreps_in1), blocks(tp.irreps_in2), blocks(tp.irreps_out)
    scales = normalisation(tp)
    active = frozenset(tp.active_instructions())
    paths: list[Path] = []
    weight_offset, slot_offset = 0, 0
    for number, (i1, i2, i_out, mode, has_weight, _) in enumerate(tp.instructions):
        shape = tp.weight_shape(number)
        start = weight_offset
        weight_offset += prod(shape) if has_weight else 0
        (mul1, ir1), (mul2, ir2), (mul_out, ir_out) = in1[i1], in2[i2], out[i_out]
        if number not in active or scales[number] == 0:
            continue
        scale = scales[number]
        nonzeros = clebsch_gordan(ir1.l, ir2.l, ir_out.l)
        entries = tuple((i, j, k, sign * sqrt(scale * square)) for i, j, k, sign, square in nonzeros)
        path = Path(
            index=number,
            mode=mode,
            mul1=mul1,
            mul2=mul2,
            mul_out=mul_out,
            l1=ir1.l,
            l2=ir2.l,
            l3=ir_out.l,
            in1_block=i1,
            in1_offset=offsets[0][i1],
            in2_offset=offsets[1][i2],
            out_offset=slot_offset if expanded else offsets[2][i_out],
            weight_offset=start if has_weight else None,
            weight_shape=shape,
            entries=entries,
        )
        slot_offset += mul_out * ir_out.dim
        paths.append(_swap(path, i2) if swapped else path)
    dims = (tp.irreps_in1.dim, tp.irreps_in2.dim)
    dim_in1, dim_in2 = dims[::-1] if swapped else dims
    dim_out = slot_offset if expanded else tp.irreps_out.dim
    return Coupling(tuple(paths), dim_in1, dim_in2, dim_out, weight_offset, tp.layout)


def _swap(path: Path, in2_block: int) -> Path:
    assert path.mode == "uvv" and path.mul1 == 1, "only uvv with multiplicity 1 in the first operand is swapped"
    return Path(
        index=path.index,
        mode="uvu",
        mul1=path.mul2,
        mul2=path.mul1,
        mul_out=path.mul_out,
        l1=path.l2,
        l2=path.l1,
        l3=path.l3,
        in1_block=in2_block,
        in1_offset=path.in2_offset,
        in2_offset=path.in1_offset,
        out_offset=path.out_offset,
        weight_offset=path.weight_offset,
        weight_shape=path.weight_shape[::-1],
        entries=tuple(sorted((j, i, k, c) for i, j, k, c in path.entries)),
    )
