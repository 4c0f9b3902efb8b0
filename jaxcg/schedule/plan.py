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


H200 = DeviceLimits(shared_bytes=227 * 1024, shared_total=228 * 1024, multiprocessors=144)

# Parts of the work of a team: what a role's share of its group is counted in.
SHARE = 1024


@dataclass(frozen=True)
class Role:
    """Paths of one x block for a range of channels.

    Attributes:
        paths: numbers into ``coupling.paths``.
        channels: channels a lane (C).
        chunk_start: first chunk of 32 * channels channels.
        chunks: number of chunks, one warp each; the warps of a team.
        cost: the estimate that the choice was made from.
        start, end: its share of the work of its group, which the teams divide evenly: team t of a block does what lies
            in [SHARE t, SHARE (t + 1)).
    """

    paths: tuple[int, ...]
    channels: int
    chunk_start: int
    chunks: int
    cost: RoleCost
    start: int = 0
    end: int = 0

    @property
    def first_team(self) -> int:
        """First team of a block that has a piece of it."""
        return self.start // SHARE

    @property
    def pieces(self) -> int:
        """Into how many ranges its edges are divided in each block."""
        return -(-self.end // SHARE) - self.first_team


@dataclass(frozen=True)
class Group:
    """Roles with teams of the same size. Each team does a piece of one role, and of the next where that ends.

    Attributes:
        roles: in this order.
        teams: of a block.
    """

    roles: tuple[Role, ...]
    teams: int

    @property
    def chunks(self) -> int:
        """Warps of a team."""
        return self.roles[0].chunks

    @property
    def load(self) -> float:
        """Time for each edge of the block that falls to one of its warps."""
        return sum(role.cost.weight for role in self.roles) / self.teams


@dataclass(frozen=True)
class Launch:
    """One kernel: a block a multiprocessor, whose teams all go their own way.

    Attributes:
        groups: the groups of a block, warps in this order.
        registers: the most registers a thread that its warps leave room for.
        batch: edges for which M is made at once, at most 32.
        stages: edges whose operands are on their way to shared memory or there, for each warp, of the role that brings
            most an edge; others have more in the same room.
        time: what it is expected to take.
    """

    groups: tuple[Group, ...]
    registers: int
    batch: int
    stages: int
    time: LaunchTime

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(role for group in self.groups for role in group.roles)

    @property
    def warps(self) -> int:
        return sum(group.teams * group.chunks for group in self.groups)


@dataclass(frozen=True)
class Schedule:
    """The launches of a call, in order.

    Attributes:
        launches: path sets, one kernel each.
        max_blocks: most blocks of a launch.
        compensated: whether sums over edges carry what rounding takes from them.
    """

    launches: tuple[Launch, ...]
    max_blocks: int
    compensated: bool = False

    @property
    def max_pieces(self) -> int:
        """Most pieces of a role: rows of scratch for receivers that a boundary between pieces cuts."""
        return self.max_blocks * max(role.pieces for launch in self.launches for role in launch.roles)


def resident_warps(registers: int) -> int:
    """Warps that a multiprocessor holds at a number of registers a thread.

    Each of its four parts has 16,384 registers and gives them out in eights a thread, so between 128 and 168 all
    numbers cost the same.

    >>> [resident_warps(r) for r in (255, 169, 168, 128, 96, 80)]
    [8, 8, 12, 16, 20, 24]
    """
    return 4 * min(16, 16384 // (32 * -(-registers // 8) * 8))
