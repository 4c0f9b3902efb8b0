"""Choose the schedule of a term set.

Three levels. A *role* is a set of paths that read one block of x; a warp does one role for 32 * channels channels.
A *launch* is a kernel whose blocks hold the warps of some roles, all on the same range of edges. A call is a
sequence of launches. What decides (measurements of one H200, mace-large):

- The loop code of all roles that share a multiprocessor must fit the instruction cache: up to 20 KB runs free, 24 KB
  nearly, 56 KB costs 1.5x, 100 KB 3x. So paths are split over launches, first by block of x: x rows, x gradients
  and weights of different blocks are disjoint, so nothing is read twice but y.
- Accumulators of a role live in registers: a role that would need more than the budget is split by paths.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from jaxcg._coupling import Coupling
from jaxcg._errors import UnsupportedError
from jaxcg._terms import TermSet
from jaxcg.schedule.cost import RoleCost, count_factors, estimate
from jaxcg.schedule.shared import plan_shared

INSTRUCTION_BYTES = 16
# Stages: two are the least that overlap; more than six only take memory from other blocks.
_STAGES = (6, 5, 4, 3, 2)
# Roles of a block: of its 16 named barriers one is for the block as a whole.
_MOST_ROLES = 15
# Float64 gradients: roles share a block only if at least this share of the warps that the smallest of them could have
# resident in a launch of its own are. mace-large, dhfr, backward: 0.97 ms with 8 of 12, 0.91 ms apart with 12. A
# forward pass waits for memory more than for registers: apart it takes 0.42 ms instead of 0.39.
_LEAST_FILLED = 0.8
# What the driver keeps of the shared memory of each resident block.
_RESERVED = 1024


@dataclass(frozen=True)
class DeviceLimits:
    """What a schedule may use. The defaults hold on every GPU since sm_80 (see `launch.limits_of`).

    Attributes:
        shared_bytes: dynamic shared memory a block.
        shared_total: shared memory of a multiprocessor, which its resident blocks divide.
        registers: estimated registers a thread above which a role is split, for float32 and float64.
        code_bytes: loop code of one launch.
        warps: warps a block.
        multiprocessors: most multiprocessors that a grid is sized for.
        channels: channels a lane to choose from.
    """

    shared_bytes: int = 99 * 1024
    shared_total: int = 100 * 1024
    registers: tuple[int, int] = (200, 240)
    code_bytes: int = 20 * 1024
    warps: int = 16
    multiprocessors: int = 192
    channels: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Role:
    """Paths of one x block for a range of channels.

    Attributes:
        paths: numbers into ``coupling.paths``.
        channels: channels a lane (C).
        chunk_start: first chunk of 32 * channels channels.
        chunks: number of chunks, one warp each.
        cost: the estimate that the choice was made from.
    """

    paths: tuple[int, ...]
    channels: int
    chunk_start: int
    chunks: int
    cost: RoleCost


@dataclass(frozen=True)
class Launch:
    """One kernel.

    Attributes:
        roles: the roles of a block, warps in this order.
        batch: edges for which M is made at once, at most 32.
        stages: edges whose operands are on their way to shared memory or there, for each warp.
        blocks_per_multiprocessor: resident blocks that registers and shared memory are divided for.
    """

    roles: tuple[Role, ...]
    batch: int
    stages: int
    blocks_per_multiprocessor: int

    @property
    def warps(self) -> int:
        return sum(role.chunks for role in self.roles)


@dataclass(frozen=True)
class Schedule:
    """The launches of a call, in order.

    Attributes:
        launches: path sets, one kernel each.
        max_blocks: most blocks of any launch: rows of scratch for receivers that a block boundary cuts.
    """

    launches: tuple[Launch, ...]
    max_blocks: int


def _split(
    coupling: Coupling, terms: TermSet, block: list[int], channels: int, itemsize: int, limits: DeviceLimits
) -> list[Role]:
    """Cut the paths of one x block into roles that fit the register budget (one path is never cut).

    As few roles as fit, since each gathers x again; of equal counts the one with the least largest role.
    """
    factors = count_factors(terms)
    budget = limits.registers[itemsize == 8]
    mul = coupling.paths[block[0]].mul1
    # Paths with the same y block side by side: a role then sums few components of a y gradient.
    order = sorted(block, key=lambda p: (coupling.paths[p].in2_offset, p)) if "Y" in factors.counts else list(block)
    count = len(order)

    @cache
    def cost(start: int, end: int) -> RoleCost:
        return estimate(tuple(coupling.paths[p] for p in order[start:end]), factors, channels, itemsize)

    # For the paths from each place on, from the last backwards: number of roles, most instructions of one, their ends.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {count: (0, 0, ())}
    for start in range(count - 1, -1, -1):
        found: list[tuple[int, int, tuple[int, ...]]] = []
        for end in range(start + 1, count + 1):
            if end > start + 1 and cost(start, end).registers > budget:
                break
            number, most, ends = best[end]
            found.append((number + 1, max(most, cost(start, end).instructions), (end, *ends)))
        best[start] = min(found)

    roles: list[Role] = []
    start = 0
    for end in best[0][2]:
        chunks = -(-mul // (32 * channels))
        roles.append(Role(tuple(sorted(order[start:end])), channels, 0, chunks, cost(start, end)))
        start = end
    return roles


def _roles_of_block(
    coupling: Coupling, terms: TermSet, block: list[int], itemsize: int, limits: DeviceLimits
) -> list[Role]:
    """The cheapest cut of one x block over channels a lane: fewest instructions an edge, all warps together.

    In float64 a second channel halves what little overhead there is beside the arithmetic, but splits roles, and
    each part gathers x and adds x gradients again (mace-large, dhfr, backward: 1.20 ms with 2 channels, 0.94 with 1).
    """
    best: tuple[int, list[Role]] | None = None
    for channels in limits.channels:
        roles = _split(coupling, terms, block, channels, itemsize, limits)
        total = sum(role.chunks * role.cost.instructions for role in roles)
        most = max(role.cost.registers for role in roles)
        if best is not None and (most > 240 or (itemsize == 8 and (len(roles) > len(best[1]) or most > 160))):
            continue
        if best is None or total < best[0]:
            best = (total, roles)
    assert best is not None
    cut: list[Role] = []
    for role in best[1]:
        warps = min(limits.warps, role.chunks)
        while warps > 1 and _finish(coupling, terms, (replace(role, chunks=warps),), itemsize, limits) is None:
            warps = -(-warps // 2)
        cut += [
            replace(role, chunk_start=start, chunks=min(warps, role.chunks - start))
            for start in range(0, role.chunks, warps)
        ]
    return cut


def resident_warps(registers: int) -> int:
    """Warps that a multiprocessor holds at a number of registers a thread.

    Each of its four parts has 16,384 registers and gives them out in eights a thread, so between 128 and 168 all
    numbers cost the same.

    >>> [resident_warps(r) for r in (255, 169, 168, 128, 96, 80)]
    [8, 8, 12, 16, 20, 24]
    """
    return 4 * min(16, 16384 // (32 * -(-registers // 8) * 8))


def _finish(
    coupling: Coupling, terms: TermSet, roles: tuple[Role, ...], itemsize: int, limits: DeviceLimits
) -> Launch | None:
    """Divide a multiprocessor between blocks: as many as registers allow, fewer if three stages would not fit.

    None if not even one block with two stages and a small batch fits, or if the roles had better not share one.
    """
    warps = sum(role.chunks for role in roles)
    resident = resident_warps(max(role.cost.registers for role in roles))
    most = max(1, min(12 if warps == 1 else 8, resident // warps))
    alone = resident_warps(min(role.cost.registers for role in roles))
    forward = all(out.slot == "z" for out in terms.outputs)
    if itemsize == 8 and not forward and len(roles) > 1 and most * warps < _LEAST_FILLED * alone:
        return None

    def fits(launch: Launch) -> bool:
        held = plan_shared(coupling, terms, launch).total * itemsize
        share = limits.shared_total // launch.blocks_per_multiprocessor - _RESERVED
        return held <= min(limits.shared_bytes, share)

    for blocks in range(most, 0, -1):
        for batch, stages in product((32, 16), _STAGES[:-1]):
            launch = Launch(roles, batch, stages, blocks)
            if fits(launch):
                return launch
    for batch in (32, 16, 8, 4, 2):
        launch = Launch(roles, batch, 2, 1)
        if fits(launch):
            return launch
    return None


def choose(coupling: Coupling, terms: TermSet, itemsize: int, limits: DeviceLimits = DeviceLimits()) -> Schedule:
    """Lay a term set over launches, roles and lanes.

    Args:
        coupling: the resolved product: every path channelwise, with an output slot of its own.
        terms: what to compute.
        itemsize: 4 for float32, 8 for float64.
        limits: what a block may use.

    Returns:
        The schedule, a pure function of the arguments.
    """
    blocks: dict[int, list[int]] = {}
    for number, path in enumerate(coupling.paths):
        blocks.setdefault(path.in1_block, []).append(number)
    roles = [role for block in blocks.values() for role in _roles_of_block(coupling, terms, block, itemsize, limits)]
    launches: list[Launch] = []
    packed: tuple[Role, ...] = ()
    for role in roles:
        grown = (*packed, role)
        code = sum(r.cost.instructions for r in grown) * INSTRUCTION_BYTES
        warps = sum(r.chunks for r in grown)
        if packed and (
            code > limits.code_bytes
            or warps > limits.warps
            or len(grown) > _MOST_ROLES
            or _finish(coupling, terms, grown, itemsize, limits) is None
        ):
            launches.append(_must_fit(coupling, terms, packed, itemsize, limits))
            grown = (role,)
        packed = grown
    launches.append(_must_fit(coupling, terms, packed, itemsize, limits))
    most = max(launch.blocks_per_multiprocessor for launch in launches)
    return Schedule(tuple(launches), limits.multiprocessors * most)


def _must_fit(
    coupling: Coupling, terms: TermSet, roles: tuple[Role, ...], itemsize: int, limits: DeviceLimits
) -> Launch:
    launch = _finish(coupling, terms, roles, itemsize, limits)
    if launch is None:
        path = coupling.paths[roles[0].paths[0]]
        raise UnsupportedError(
            f"the kernel of a path l = {path.l1} x {path.l2} -> {path.l3} needs more than the "
            f"{limits.shared_bytes} bytes of shared memory that a block has; use impl='xla'"
        )
    return launch
