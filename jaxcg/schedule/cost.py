"""What a role costs: registers, instructions, shared memory. Estimates, from counts that the lowering shares."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from jaxcg._coupling import Path
from jaxcg._terms import TermSet

# Registers that every thread needs beside its values: addresses, loop counters, the edge's indices.
BASE_REGISTERS = 36
# Instructions an edge costs a warp beside its arithmetic: shuffles of indices, row check, loop.
BASE_INSTRUCTIONS = 30


@dataclass(frozen=True)
class Factors:
    """How many distinct factors the terms of a set need at each (i, k) of a path.

    Attributes:
        z_sums: (z output, y operand) pairs: one multiply-add into an accumulator each.
        contractions: (y, z) operand pairs whose sum over k a gradient of x or w needs.
        x_terms: terms with x open, one multiply-add for each i.
        w_terms: terms with w open, one multiply-add for each i.
        y_sums: (y output, z operand) pairs: one product over channels each.
        scaled: distinct sums of w x products, made once for each i.
        counts: operands of each slot; outputs of each slot under the upper-case letter.
    """

    z_sums: int
    contractions: int
    x_terms: int
    w_terms: int
    y_sums: int
    scaled: int
    counts: Counter[str]


def count_factors(terms: TermSet) -> Factors:
    """Count the factors of a term set."""
    z_sums = {(n, t.y) for n, out in enumerate(terms.outputs) if out.slot == "z" for t in out.terms}
    y_sums = {(n, t.z) for n, out in enumerate(terms.outputs) if out.slot == "y" for t in out.terms}
    contractions = {(t.y, t.z) for out in terms.outputs if out.slot in "xw" for t in out.terms}
    counts = Counter(terms.operands)
    counts.update(out.slot.upper() for out in terms.outputs)
    pairs = [(out.slot, n, t) for n, out in enumerate(terms.outputs) for t in out.terms if out.slot in "yz"]
    return Factors(
        z_sums=len(z_sums),
        contractions=len(contractions),
        x_terms=sum(len(out.terms) for out in terms.outputs if out.slot == "x"),
        w_terms=sum(len(out.terms) for out in terms.outputs if out.slot == "w"),
        y_sums=len(y_sums),
        scaled=len(pairs),
        counts=counts,
    )


@dataclass(frozen=True)
class Shape:
    """Sizes of a path that cost depends on.

    Attributes:
        pairs: (i, k) with a nonzero coefficient for some j.
        rows: i with a nonzero coefficient.
        nonzeros: coefficients.
        distinct: columns C[i, :, k] that differ up to sign: entries of M to make for each edge.
    """

    pairs: int
    rows: int
    nonzeros: int
    distinct: int


def measure(path: Path) -> Shape:
    """Count the structure of one path."""
    columns = distinct_columns(path)
    return Shape(
        pairs=len(columns.place),
        rows=len({i for i, _ in columns.place}),
        nonzeros=len(path.entries),
        distinct=len(columns.columns),
    )


@dataclass(frozen=True)
class Columns:
    """The distinct columns C[i, :, k] of a path, up to sign.

    Attributes:
        columns: each a tuple of (j, coefficient), the first coefficient positive.
        place: for each (i, k), the number of its column and its sign.
    """

    columns: tuple[tuple[tuple[int, float], ...], ...]
    place: dict[tuple[int, int], tuple[int, int]]


def distinct_columns(path: Path) -> Columns:
    """Find the columns of a path that differ up to sign (mace-large: 187 pairs (i, k), 132 columns)."""
    gathered: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for i, j, k, value in path.entries:
        gathered.setdefault((i, k), []).append((j, value))
    numbers: dict[tuple[tuple[int, float], ...], int] = {}
    columns: list[tuple[tuple[int, float], ...]] = []
    place = {}
    for pair, column in sorted(gathered.items()):
        sign = 1 if column[0][1] > 0 else -1
        key = tuple((j, float(np.format_float_scientific(sign * value, 13))) for j, value in column)
        if key not in numbers:
            numbers[key] = len(columns)
            columns.append(tuple((j, sign * value) for j, value in column))
        place[pair] = (numbers[key], sign)
    return Columns(tuple(columns), place)


@dataclass(frozen=True)
class RoleCost:
    """Estimates for one warp of a role.

    Attributes:
        registers: 32-bit registers a thread.
        instructions: instructions an edge, all channels of the lane.
        multiply_adds: of those, the arithmetic.
    """

    registers: int
    instructions: int
    multiply_adds: int


def estimate(paths: tuple[Path, ...], factors: Factors, channels: int, itemsize: int) -> RoleCost:
    """Estimate a role that does `paths` (all of one x block) with `channels` channels a lane."""
    c, n = channels, factors.counts
    shapes = [measure(path) for path in paths]
    components = sum(2 * path.l3 + 1 for path in paths)
    x_dim = 2 * paths[0].l1 + 1
    y_dim = len({path.in2_offset + j for path in paths for j in range(2 * path.l2 + 1)})
    values = (
        components * c * (n["Z"] + n["z"])
        + x_dim * c * (n["x"] + n["X"])
        + y_dim * n["Y"]
        + c * (n["w"] + n["W"])
        + c * min(factors.scaled + factors.contractions, 6)
        + 8 * max(n["y"], 1)
    )
    multiply_adds = 0
    other = BASE_INSTRUCTIONS + x_dim * c * (n["x"] + n["X"])
    for shape, path in zip(shapes, paths, strict=True):
        multiply_adds += shape.pairs * c * (factors.z_sums + factors.contractions + factors.y_sums)
        multiply_adds += shape.rows * c * (factors.x_terms + factors.w_terms + factors.scaled)
        multiply_adds += shape.nonzeros * n["Y"]
        other += c * (n["w"] + n["W"]) * (path.weight_offset is not None)
        other += -(-shape.distinct // 4) * n["y"] * (1 if itemsize == 4 else 2)
    other += 3 * y_dim * n["Y"] * (1 if itemsize == 4 else 2)
    return RoleCost(BASE_REGISTERS + values * itemsize // 4, multiply_adds + other, multiply_adds)
