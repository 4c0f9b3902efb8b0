"""Choose the schedule of a term set.

Three levels. A *role* is a set of paths that read one block of x; a warp does one role for 32 * channels channels. The
warps of a role for all its channels are a *team*, which walks a range of edges by itself. A *launch* is a kernel; the
teams of each of its blocks divide the work of its roles evenly among them. A call is a sequence of launches.

The choice is by expected time (`cost.launch_time`), over how the blocks of x are divided between launches, how many
registers a thread of each launch has, and how many channels a lane of each role holds. What weighs there
(measurements of one H200, mace-large):

- The loop code of all roles that share a multiprocessor must fit the instruction cache. So paths are split over
  launches by block of x: x rows, x gradients and weights of different blocks are disjoint, so nothing is read twice
  but y.
- Accumulators of a role live in registers: a role that would need more than its launch has is split by paths, and each
  part gathers x again.
- Fewer registers a thread mean more warps, which hide each other's waits.
"""

from dataclasses import replace
from functools import cache

from jaxcg._coupling import Coupling
from jaxcg._errors import UnsupportedError
from jaxcg._terms import TermSet
from jaxcg.schedule.cost import LAUNCH_CYCLES, RoleCost, count_factors, estimate, launch_time
from jaxcg.schedule.plan import SHARE, DeviceLimits, Group, Launch, Role, Schedule, resident_warps
from jaxcg.schedule.shared import Room, total_elements

# Edges of a batch and stages, the best that fits is taken: three stages are the least that overlap well, and a batch of
# 16 leaves half of the lanes idle while M is made.
_SHAPES = ((32, 6), (32, 5), (16, 6), (32, 4), (16, 5), (16, 4), (32, 3), (16, 3), (8, 4), (8, 3))
_SMALL_SHAPES = ((32, 2), (16, 2), (8, 2), (4, 2), (2, 2))
# Teams of more than one warp meet at a named barrier of their own; a block has sixteen.
_MOST_BARRIERS = 15
# What the driver keeps of the shared memory of a block.
_RESERVED = 1024


class _Chooser:
    """The choice for one term set: what its steps share."""

    def __init__(
        self, coupling: Coupling, terms: TermSet, itemsize: int, limits: DeviceLimits, compensated: bool
    ) -> None:
        self.coupling, self.terms, self.itemsize, self.limits = coupling, terms, itemsize, limits
        self.factors = count_factors(terms, compensated)
        self.blocks: dict[int, list[int]] = {}
        for number, path in enumerate(coupling.paths):
            self.blocks.setdefault(path.in1_block, []).append(number)
        self.roles = cache(self._roles)
        self.split = cache(self._split)
        self.launch = cache(self._launch)
        self.rooms: dict[tuple[tuple[int, ...], int], Room] = {}

    def room(self, group: Group) -> Room:
        """Shared memory that the roles of a group need."""
        for role in group.roles:
            if (role.paths, role.channels) not in self.rooms:
                self.rooms[role.paths, role.channels] = Room.of_role(self.coupling, self.terms, role)
        return Room.largest([self.rooms[role.paths, role.channels] for role in group.roles])

    def _split(self, block: int, channels: int, registers: int) -> tuple[Role, ...] | None:
        """Cut the paths of one x block into roles that fit a number of registers (one path is never cut).

        As few roles as fit, since each gathers x again; of equal counts the one with the least largest role. None if
        one path alone does not fit, unless there are no more registers to be had.
        """
        coupling, last = self.coupling, registers == self.limits.registers[-1]
        block_paths = self.blocks[block]
        mul = coupling.paths[block_paths[0]].mul1
        # Paths with the same y block side by side: a role then sums few components of a y gradient.
        order = list(block_paths)
        if "Y" in self.factors.counts:
            order.sort(key=lambda p: (coupling.paths[p].in2_offset, p))
        count = len(order)

        @cache
        def cost(start: int, end: int) -> RoleCost:
            paths = tuple(coupling.paths[p] for p in order[start:end])
            return estimate(paths, self.factors, channels, self.itemsize)

        # For the paths from each place on, from the last backwards: number of roles, most slots of one, their ends.
        best: dict[int, tuple[int, int, tuple[int, ...]]] = {count: (0, 0, ())}
        for start in range(count - 1, -1, -1):
            found: list[tuple[int, int, tuple[int, ...]]] = []
            for end in range(start + 1, count + 1):
                if cost(start, end).registers > registers and not (last and end == start + 1):
                    break
                number, most, ends = best[end]
                found.append((number + 1, max(most, cost(start, end).slots), (end, *ends)))
            if not found:
                return None
            best[start] = min(found)
        roles: list[Role] = []
        start = 0
        for end in best[0][2]:
            chunks = -(-mul // (32 * channels))
            roles.append(Role(tuple(sorted(order[start:end])), channels, 0, chunks, cost(start, end)))
            start = end
        return tuple(roles)

    def _roles(self, block: int, registers: int) -> tuple[Role, ...] | None:
        """The cheapest cut of one x block over channels a lane: the one that would be fastest in a launch by itself."""
        best: tuple[float, tuple[Role, ...]] | None = None
        for channels in self.limits.channels:
            if channels * self.itemsize > 16:
                continue  # no access moves more than 16 bytes
            whole = self.split(block, channels, registers)
            if whole is None:
                continue
            roles = self._cut(whole, registers)
            alone = [self.launch((role,), registers) for role in roles]
            if None in alone:
                continue  # too much shared memory: fewer channels a lane need less
            time = sum(launch.time.total - LAUNCH_CYCLES for launch in alone if launch is not None)
            if best is None or time < best[0]:
                best = (time, roles)
        if best is None and registers == self.limits.registers[-1]:
            path = self.coupling.paths[self.blocks[block][0]]
            raise UnsupportedError(
                f"the kernel of a path l = {path.l1} x {path.l2} -> {path.l3} needs more than the "
                f"{self.limits.shared_bytes} bytes of shared memory that a block has; use impl='xla'"
            )
        return None if best is None else best[1]

    def _cut(self, roles: tuple[Role, ...], registers: int) -> tuple[Role, ...]:
        """The same roles with teams of no more warps than a block may have."""
        most = min(self.limits.warps, resident_warps(registers))
        cut: list[Role] = []
        for role in roles:
            warps = min(most, role.chunks)
            while warps > 1 and self.launch((replace(role, chunks=warps),), registers) is None:
                warps = -(-warps // 2)
            cut += [
                replace(role, chunk_start=start, chunks=min(warps, role.chunks - start))
                for start in range(0, role.chunks, warps)
            ]
        return tuple(cut)

    def _spread(self, roles: tuple[Role, ...], warps: int) -> tuple[Group, ...] | None:
        """Divide the warps of a block: one team more for the group whose teams have most to do, while one fits."""
        by_size: dict[int, list[Role]] = {}
        for role in roles:
            by_size.setdefault(role.chunks, []).append(role)
        groups = [Group(tuple(found), 1) for found in by_size.values()]
        if sum(by_size) > warps or sum(size > 1 for size in by_size) > _MOST_BARRIERS:
            return None
        while True:
            free = warps - sum(group.teams * group.chunks for group in groups)
            barriers = _MOST_BARRIERS - sum(group.teams for group in groups if group.chunks > 1)
            fitting = [
                n for n, group in enumerate(groups) if group.chunks <= free and (group.chunks == 1 or barriers > 0)
            ]
            if not fitting:
                return tuple(map(shared_out, groups))
            n = max(fitting, key=lambda n: (groups[n].load, -n))
            groups[n] = replace(groups[n], teams=groups[n].teams + 1)

    def _launch(self, roles: tuple[Role, ...], registers: int) -> Launch | None:
        """A launch of these roles: as many warps as registers allow, fewer if their stages do not fit.

        None if not even one team of each size fits with two stages and a small batch.
        """
        warps = min(self.limits.warps, resident_warps(registers))
        least = sum({role.chunks for role in roles})
        for count in range(warps, least - 1, -1):
            groups = self._spread(roles, count)
            if groups is None:
                return None
            taken = sum(group.teams * group.chunks for group in groups)
            if taken < count and count > least:
                continue  # the same as with fewer
            work = sum(role.cost.weight * role.chunks for role in roles)
            busy = work / max(group.load for group in groups)
            time = launch_time([(role.cost, role.chunks) for role in roles], taken, busy)
            rooms = [(group, self.room(group)) for group in groups]
            for batch, stages in _SHAPES + (_SMALL_SHAPES if count == least else ()):
                held = total_elements(rooms, batch, stages) * self.itemsize
                if held <= min(self.limits.shared_bytes, self.limits.shared_total - _RESERVED):
                    return Launch(groups, registers, batch, stages, time)
        return None

    def together(self, blocks: tuple[int, ...]) -> tuple[Launch, ...] | None:
        """The fastest launches for some blocks of x: one for all, or for one block of x several."""
        found: list[tuple[Launch, ...]] = []
        for registers in self.limits.registers:
            roles: list[Role] = []
            for block in blocks:
                cut = self.roles(block, registers)
                if cut is None:
                    break
                roles += cut
            else:
                launch = self.launch(tuple(roles), registers)
                if launch is not None:
                    found.append((launch,))
                alone = [self.launch((role,), registers) for role in roles] if len(blocks) == 1 else [None]
                if None not in alone:
                    found.append(tuple(one for one in alone if one is not None))
        return min(found, key=_time, default=None)


def shared_out(group: Group) -> Group:
    """Give each role its share of the group's work. None is so small that it gets nothing."""
    whole, total = SHARE * group.teams, sum(role.cost.weight for role in group.roles)
    roles: list[Role] = []
    start, done = 0, 0
    for left, role in zip(range(len(group.roles) - 1, -1, -1), group.roles, strict=True):
        done += role.cost.weight
        end = whole * done // total
        # Not a piece of a few edges, but something for each of those that are left.
        near = SHARE * round(end / SHARE)
        end = near if abs(end - near) < SHARE // 16 else end
        end = min(max(end, start + 1), whole - left)
        roles.append(replace(role, start=start, end=end))
        start = end
    return replace(group, roles=tuple(roles))


def _time(launches: tuple[Launch, ...]) -> float:
    return sum(launch.time.total for launch in launches)


# Blocks of x that share a launch are neighbours, at most this many: with more, code and warps are full anyway.
_MOST_TOGETHER = 8


def choose(
    coupling: Coupling, terms: TermSet, itemsize: int, limits: DeviceLimits | None = None, compensated: bool = False
) -> Schedule:
    """Lay a term set over launches, roles and lanes.

    Args:
        coupling: the resolved product: every path channelwise, with an output slot of its own.
        terms: what to compute.
        itemsize: 4 for float32, 8 for float64.
        limits: what a block may use; as on the smallest GPU if left out.
        compensated: whether sums over edges carry what rounding takes from them, which takes registers.

    Returns:
        The schedule, a pure function of the arguments.

    Raises:
        UnsupportedError: a path needs more shared memory than there is.
    """
    limits = limits or DeviceLimits()
    chooser = _Chooser(coupling, terms, itemsize, limits, compensated)
    blocks = list(chooser.blocks)
    # For the blocks from each place on: the time and the launches.
    best: dict[int, tuple[float, tuple[Launch, ...]]] = {len(blocks): (0.0, ())}
    for start in range(len(blocks) - 1, -1, -1):
        for end in range(start + 1, min(start + _MOST_TOGETHER, len(blocks)) + 1):
            launches = chooser.together(tuple(blocks[start:end]))
            if launches is None:
                break
            time, rest = best[end]
            if start not in best or _time(launches) + time < best[start][0]:
                best[start] = (_time(launches) + time, launches + rest)
    return Schedule(best[0][1], limits.multiprocessors, compensated)
