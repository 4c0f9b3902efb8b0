"""Shared memory of a block: how much each part takes, and where it lies."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from jaxcg._coupling import Coupling, Path
from jaxcg._terms import TermSet
from jaxcg.schedule.cost import distinct_columns, y_components

if TYPE_CHECKING:
    from jaxcg.schedule.plan import Group, Launch, Role


def table_stride(coupling: Coupling, role: "Role") -> int:
    """Elements between the M rows of two edges: whole quads, an odd number, so that lanes hit different banks."""
    quads = sum(-(-len(distinct_columns(coupling.paths[p]).columns) // 4) for p in role.paths)
    return 4 * (quads | 1)


_MOST_STAGES = 12


def ring_stages(ring: int, stage: int) -> int:
    """Edges whose operands fit a ring, at most 12: light roles need many. 0 if nothing is copied."""
    return min(_MOST_STAGES, ring // stage) if stage else 0


# Components of a y gradient that go through shared memory at once; fewer than this go by shuffles.
LANE_SUMS = (32, 16, 8)


def group_components(count: int) -> list[int]:
    """Sizes of the groups in which a warp sums `count` values over its lanes: powers of two, the last one padded.

    >>> group_components(16), group_components(36), group_components(5), group_components(3)
    ([16], [32, 4], [8], [4])
    """
    groups = [32] * (count // 32)
    if count % 32:
        groups.append(1 << (count % 32 - 1).bit_length())
    return groups


def transit_elements(coupling: Coupling, terms: TermSet, role: "Role") -> int:
    """Room through which values of one warp pass from lanes to their order in memory.

    To sum a y gradient over the lanes (`sum_lanes` of the prelude), and in layout mul_ir to write a slice of a z block
    in one run.
    """
    paths, open_slots = tuple(coupling.paths[p] for p in role.paths), {out.slot for out in terms.outputs}
    rooms = [0]
    if "y" in open_slots:
        rooms += [32 * (size + 5) for size in group_components(len(y_components(paths))) if size in LANE_SUMS]
    if "z" in open_slots and coupling.layout == "mul_ir":
        rooms.append(32 * role.channels * max(2 * path.l3 + 1 for path in paths))
    return max(rooms)


def stage_elements(coupling: Coupling, terms: TermSet, role: "Role") -> int:
    """What one edge brings to one warp: its channels of the w columns and of the x block, for every operand.

    In layout mul_ir an x gradient leaves through the place of the x block, so that it is added in order of memory;
    without an x operand it has a place of its own.
    """
    path = coupling.paths[role.paths[0]]
    block = 2 * path.l1 + 1
    blocks = block * terms.operands.count("x")
    if not blocks and coupling.layout == "mul_ir" and any(out.slot == "x" for out in terms.outputs):
        blocks = block
    return 32 * role.channels * (len(role.paths) * terms.operands.count("w") + blocks)


def is_packed(coupling: Coupling, role: "Role") -> bool:
    """Whether a lane's channels can be neighbours: whole slices, every row and block aligned."""
    c = role.channels
    paths = [coupling.paths[p] for p in role.paths]
    if c == 1 or paths[0].mul1 % (32 * c):
        return False
    return all(value % c == 0 for value in (coupling.dim_in1, coupling.dim_out, coupling.weight_numel)) and all(
        offset % c == 0 for path in paths for offset in (path.in1_offset, path.out_offset, path.weight_offset or 0)
    )


def copy_bytes(row: int, offsets: tuple[int, ...], mul: int, itemsize: int) -> int:
    """Widest asynchronous copy (16, 8 or 4 bytes) whose pieces neither straddle a block nor lie unaligned."""
    width = gcd(row * itemsize, mul * itemsize, 16, *(offset * itemsize for offset in offsets))
    return max(width, 4)


def z_copy_bytes(coupling: Coupling, path: Path, itemsize: int) -> int:
    """Width in which runs of a z block are written."""
    return copy_bytes(coupling.dim_out, (path.out_offset,), path.mul1, itemsize)


def w_copy_bytes(coupling: Coupling, paths: tuple[Path, ...], itemsize: int) -> int:
    """Width of the copies of w columns."""
    offsets = tuple(path.weight_offset or 0 for path in paths)
    return copy_bytes(coupling.weight_numel, offsets, paths[0].mul1, itemsize)


def x_copy_bytes(coupling: Coupling, path: Path, itemsize: int) -> int:
    """Width of the copies of an x block."""
    return copy_bytes(coupling.dim_in1, (path.in1_offset,), path.mul1, itemsize)


@dataclass(frozen=True)
class SharedPlan:
    """Where the parts lie, in elements from the start of the block's shared memory, for each group of the launch.

    Attributes:
        tables: M of the first team; those of its other teams follow.
        table_sizes: elements of the M of one team, of the role that needs most.
        transits: where values of the first warp pass from lanes to memory; the places of its other warps follow.
        transit_sizes: elements of one such place.
        rings: the stages of the first warp; those of its other warps follow.
        ring_sizes: elements of one ring.
        total: all of it.
    """

    tables: tuple[int, ...]
    table_sizes: tuple[int, ...]
    transits: tuple[int, ...]
    transit_sizes: tuple[int, ...]
    rings: tuple[int, ...]
    ring_sizes: tuple[int, ...]
    total: int


@dataclass(frozen=True)
class Room:
    """Elements that a role, or the roles of a group one after the other, need.

    Attributes:
        table: M of one edge, for a team.
        transit: for a warp.
        stage: for a warp.
    """

    table: int
    transit: int
    stage: int

    @classmethod
    def of_role(cls, coupling: Coupling, terms: TermSet, role: "Role") -> "Room":
        """What one role needs; it depends on its paths and channels alone."""
        table = terms.operands.count("y") * table_stride(coupling, role)
        return cls(table, transit_elements(coupling, terms, role), stage_elements(coupling, terms, role))

    @classmethod
    def largest(cls, rooms: Sequence["Room"]) -> "Room":
        """Enough for each of some."""
        return cls(max(r.table for r in rooms), max(r.transit for r in rooms), max(r.stage for r in rooms))


def total_elements(groups: Sequence[tuple["Group", Room]], batch: int, stages: int) -> int:
    """Elements of a block."""
    return sum(
        group.teams * (batch * room.table + group.chunks * (room.transit + stages * room.stage))
        for group, room in groups
    )


def plan_shared(coupling: Coupling, terms: TermSet, launch: "Launch") -> SharedPlan:
    """Lay out the shared memory of a launch."""
    groups = launch.groups
    rooms = [Room.largest([Room.of_role(coupling, terms, role) for role in group.roles]) for group in groups]
    table_sizes = tuple(launch.batch * room.table for room in rooms)
    transit_sizes = tuple(room.transit for room in rooms)
    ring_sizes = tuple(launch.stages * room.stage for room in rooms)
    at = 0
    tables: list[int] = []
    for group, size in zip(groups, table_sizes, strict=True):
        tables.append(at)
        at += group.teams * size
    transits: list[int] = []
    for group, size in zip(groups, transit_sizes, strict=True):
        transits.append(at)
        at += group.teams * group.chunks * size
    rings: list[int] = []
    for group, size in zip(groups, ring_sizes, strict=True):
        rings.append(at)
        at += group.teams * group.chunks * size
    assert at == total_elements(list(zip(groups, rooms, strict=True)), launch.batch, launch.stages)
    return SharedPlan(tuple(tables), table_sizes, tuple(transits), transit_sizes, tuple(rings), ring_sizes, at)
