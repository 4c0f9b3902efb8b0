"""What a schedule is: roles, launches, and the limits of the device that they are made for."""

from dataclasses import dataclass

from jaxcg.schedule.cost import LaunchTime, RoleCost


@dataclass(frozen=True)
class DeviceLimits:
    """What a schedule may use. The defaults hold on every GPU since sm_80 (see `launch.limits_of`).

    Attributes:
        shared_bytes: dynamic shared memory a block.
        shared_total: shared memory of a multiprocessor.
        registers: numbers of registers a thread to plan for, ascending. Each is a step in `resident_warps`.
        warps: most warps a block.
        multiprocessors: most multiprocessors that a grid is sized for.
        channels: channels a lane to choose from.
    """

    shared_bytes: int = 99 * 1024
    shared_total: int = 100 * 1024
    registers: tuple[int, ...] = (112, 168, 240)
    warps: int = 20
    multiprocessors: int = 192
    channels: tuple[int, ...] = (1, 2, 4)


@dataclass(frozen=True)
class Role:
    """Paths of one x block for a range of channels.

    Attributes:
        paths: numbers into ``coupling.paths``.
        channels: channels a lane (C).
        chunk_start: first chunk of 32 * channels channels.
        chunks: number of chunks, one warp each; the warps of a team.
        cost: the estimate that the choice was made from.
        streams: teams of a block, each with a range of edges of its own.
    """

    paths: tuple[int, ...]
    channels: int
    chunk_start: int
    chunks: int
    cost: RoleCost
    streams: int = 1

    @property
    def warps(self) -> int:
        return self.chunks * self.streams

    @property
    def load(self) -> float:
        """Issue slots for each edge of the block that fall to one of its warps."""
        return self.cost.slots / self.streams


@dataclass(frozen=True)
class Launch:
    """One kernel: a block a multiprocessor, whose teams all go their own way.

    Attributes:
        roles: the roles of a block, warps in this order.
        registers: the most registers a thread that its warps leave room for.
        batch: edges for which M is made at once, at most 32.
        stages: edges whose operands are on their way to shared memory or there, for each warp.
        time: what it is expected to take.
    """

    roles: tuple[Role, ...]
    registers: int
    batch: int
    stages: int
    time: LaunchTime

    @property
    def warps(self) -> int:
        return sum(role.warps for role in self.roles)


@dataclass(frozen=True)
class Schedule:
    """The launches of a call, in order.

    Attributes:
        launches: path sets, one kernel each.
        max_blocks: most blocks of a launch.
    """

    launches: tuple[Launch, ...]
    max_blocks: int

    @property
    def max_teams(self) -> int:
        """Most teams of a role: rows of scratch for receivers that a boundary between teams cuts."""
        return self.max_blocks * max(role.streams for launch in self.launches for role in launch.roles)


def resident_warps(registers: int) -> int:
    """Warps that a multiprocessor holds at a number of registers a thread.

    Each of its four parts has 16,384 registers and gives them out in eights a thread, so between 128 and 168 all
    numbers cost the same.

    >>> [resident_warps(r) for r in (255, 169, 168, 128, 96, 80)]
    [8, 8, 12, 16, 20, 24]
    """
    return 4 * min(16, 16384 // (32 * -(-registers // 8) * 8))
