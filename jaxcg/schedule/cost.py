"""What a role costs: registers, issue slots, bytes; and the time of a launch. Estimates, from counts that the lowering
shares.

Times are in cycles of one multiprocessor for each edge of the graph (`cycles * edges / multiprocessors` for a call).
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxcg._coupling import Path
from jaxcg._terms import TermSet

# One H200: 132 multiprocessors at 1.755 GHz; a copy moves 4.3 TB/s, the L2 serves about 4.9 TB/s.
_MULTIPROCESSORS, _GIGAHERTZ = 132, 1.755
STREAM_BYTES_A_CYCLE = 18.6
CACHED_BYTES_A_CYCLE = 21.0
# What a byte written, and a byte added atomically, cost the L2 beside a byte read.
_WRITTEN, _ADDED = 1.15, 1.6
# Registers that every thread needs beside its values: addresses, loop counters, the edge's indices.
BASE_REGISTERS = 44
# Instructions an edge costs a warp beside its arithmetic: shuffles of indices, row check, loop.
BASE_INSTRUCTIONS = 50
# What a warp waits at an edge (copies, shared memory, dependent instructions), in issue slots, which others use then.
# Forward pass of mace-large, dhfr, with 80, 150, 250 and 400: float32 0.181, 0.178, 0.1755, 0.177 ms, float64 0.338,
# 0.329, 0.323, 0.329.
EDGE_WAIT = 250


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
        compensated: whether sums over edges carry what rounding takes from them.
    """

    z_sums: int
    contractions: int
    x_terms: int
    w_terms: int
    y_sums: int
    scaled: int
    counts: Counter[str]
    compensated: bool = False


def count_factors(terms: TermSet, compensated: bool = False) -> Factors:
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
        compensated=compensated,
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


@lru_cache(maxsize=4096)
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


@lru_cache(maxsize=4096)
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
        slots: cycles in which the warp keeps a scheduler or its arithmetic busy. A float64 multiply-add takes two.
        stream_bytes: bytes an edge that come from or go to memory: w and its gradients.
        cached_bytes: bytes an edge that pass the L2: w and x, and their gradients weighed as writes and as sums.
        reach: edges by which a boundary between teams may move so that it cuts no receiver. A cut row of z is written,
            read and added up; in the time of that, so many edges could be done.
        channels: channels a lane.
    """

    registers: int
    instructions: int
    multiply_adds: int
    slots: int
    stream_bytes: int
    cached_bytes: int
    reach: int
    channels: int

    @property
    def weight(self) -> int:
        """Time of an edge for one warp among others, in issue slots: beside its own, what it waits at each edge."""
        return self.slots + EDGE_WAIT


def y_components(paths: tuple[Path, ...]) -> tuple[int, ...]:
    """Components of a row of y that some paths read."""
    return tuple(sorted({path.in2_offset + j for path in paths for j in range(2 * path.l2 + 1)}))


def estimate(paths: tuple[Path, ...], factors: Factors, channels: int, itemsize: int) -> RoleCost:
    """Estimate a role that does `paths` (all of one x block) with `channels` channels a lane."""
    c, n = channels, factors.counts
    shapes = [measure(path) for path in paths]
    components = sum(2 * path.l3 + 1 for path in paths)
    carried = (components + max(2 * path.l3 + 1 for path in paths)) * n["Z"] * factors.compensated
    x_dim = 2 * paths[0].l1 + 1
    y_dim = len(y_components(paths))
    values = (
        components * c * (n["Z"] + n["z"])
        + carried * c
        + x_dim * c * (n["x"] + n["X"])
        + y_dim * n["Y"]
        + c * (n["w"] + n["W"])
        + c * min(factors.scaled + factors.contractions, 6)
        + 8 * max(n["y"], 1)
    )
    weighted = sum(path.weight_offset is not None for path in paths)
    # A compensated sum is four additions where the product was added before.
    multiply_adds = 4 * components * c * n["Z"] * factors.compensated
    other = BASE_INSTRUCTIONS + x_dim * (n["x"] + c * n["X"]) + weighted * (n["w"] + n["W"])
    for shape in shapes:
        multiply_adds += shape.pairs * c * (factors.z_sums + factors.contractions + factors.y_sums)
        multiply_adds += shape.rows * c * (factors.x_terms + factors.w_terms + factors.scaled)
        multiply_adds += shape.nonzeros * n["Y"]
        other += -(-shape.distinct // 4) * n["y"] * itemsize // 4
    # Copies: 16 bytes a lane.
    other += -(-(weighted * n["w"] + x_dim * n["x"]) * c * itemsize // 16)
    # Making M: each entry is about two multiply-adds, for 32 edges at a time.
    other += sum(shape.distinct for shape in shapes) * n["y"] // 12
    # The sum over lanes: write, read and add each component.
    other += (10 + y_dim * 5 // 2) * n["Y"] * itemsize // 4
    lanes = 32 * c * itemsize
    slots = other + multiply_adds * itemsize // 4
    return RoleCost(
        registers=BASE_REGISTERS + values * itemsize // 4,
        instructions=multiply_adds + other,
        multiply_adds=multiply_adds,
        slots=slots,
        stream_bytes=weighted * (n["w"] + n["W"]) * lanes,
        cached_bytes=int((weighted * (n["w"] + _WRITTEN * n["W"]) + x_dim * (n["x"] + _ADDED * n["X"])) * lanes),
        reach=int(3 * components * n["Z"] * lanes / CACHED_BYTES_A_CYCLE * 2.6 / slots),
        channels=c,
    )


# What the start of a launch and its ragged end cost, spread over 56,000 edges: 3 us.
LAUNCH_CYCLES = 12.0
# How often a scheduler issues: a warp could in two cycles of five. All together are limited by reads
# of registers: more channels a lane share an operand.
_WARP_RATE = 0.39
_MOST_RATE = {1: 0.60, 2: 0.72, 4: 0.76}
# Loop code that runs free; 34 KB more cost half the speed (56 KB 1.5x, 100 KB 3x, by a prototype).
_FREE_CODE = 20 * 1024
_CODE_HALF = 34 * 1024
INSTRUCTION_BYTES = 16


@dataclass(frozen=True)
class LaunchTime:
    """Expected time of a launch, in cycles an edge.

    Attributes:
        issue: if issue slots alone limited it.
        memory: if bytes alone limited it.
        total: both, which overlap but not fully, and the start.
    """

    issue: float
    memory: float
    total: float


def launch_time(roles: list[tuple[RoleCost, int]], warps: int, busy: float) -> LaunchTime:
    """Expected time of a launch.

    Args:
        roles: for each role its cost and the warps of a team.
        warps: warps of a block.
        busy: how many of them are busy on average: at the end those with less to do wait for the others.
    """
    slots = sum(cost.slots * chunks for cost, chunks in roles)
    most = slots / sum(cost.slots * chunks / _MOST_RATE[cost.channels] for cost, chunks in roles)
    rate = 4 * min(most, 1 - (1 - _WARP_RATE) ** (warps / 4))
    code = sum(cost.instructions for cost, _ in roles) * INSTRUCTION_BYTES
    issue = slots / rate * (1 + 0.5 * max(0, code - _FREE_CODE) / _CODE_HALF)
    stream = sum(cost.stream_bytes * chunks for cost, chunks in roles)
    cached = sum(cost.cached_bytes * chunks for cost, chunks in roles)
    memory = max(stream / STREAM_BYTES_A_CYCLE, cached / CACHED_BYTES_A_CYCLE)
    # Half of what idle warps could have done, the others do meanwhile.
    idle = 1 + 0.5 * (warps / busy - 1)
    return LaunchTime(issue, memory, (issue**4 + memory**4) ** 0.25 * idle + LAUNCH_CYCLES)


def nanoseconds(cycles: float) -> float:
    """Cycles of one multiprocessor, in time of the whole device: what an edge takes among many."""
    return cycles / _MULTIPROCESSORS / _GIGAHERTZ
