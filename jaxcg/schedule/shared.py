"""Shared memory of a block: how much each part takes, and where it lies."""

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from jaxcg._coupling import Coupling, Path
from jaxcg._terms import TermSet
from jaxcg.schedule.cost import distinct_columns

if TYPE_CHECKING:
    from jaxcg.schedule.choose import Launch, Role


def table_stride(coupling: Coupling, role: "Role") -> int:
    """Elements between the M rows of two edges: whole quads, an odd number, so that lanes hit different banks."""
    quads = sum(-(-len(distinct_columns(coupling.paths[p]).columns) // 4) for p in role.paths)
    return 4 * (quads | 1)


def table_elements(coupling: Coupling, terms: TermSet, role: "Role", batch: int) -> int:
    """M of a batch, for every y operand."""
    return terms.operands.count("y") * batch * table_stride(coupling, role)


def sum_elements(coupling: Coupling, terms: TermSet, warps: int, batch: int) -> int:
    """Partial sums of y gradients: a row for each warp and edge of a batch."""
    outputs = sum(out.slot == "y" for out in terms.outputs)
    return -(-outputs * warps * batch * coupling.dim_in2 // 4) * 4


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
    """Whether a lane's channels can be neighbours: layout ir_mul, whole slices, every row and block aligned."""
    c = role.channels
    paths = [coupling.paths[p] for p in role.paths]
    if c == 1 or coupling.layout != "ir_mul" or paths[0].mul1 % (32 * c):
        return False
    return all(value % c == 0 for value in (coupling.dim_in1, coupling.dim_out, coupling.weight_numel)) and all(
        offset % c == 0 for path in paths for offset in (path.in1_offset, path.out_offset, path.weight_offset or 0)
    )


def copy_bytes(row: int, offsets: tuple[int, ...], mul: int, itemsize: int) -> int:
    """Widest asynchronous copy (16, 8 or 4 bytes) whose pieces neither straddle a block nor lie unaligned."""
    width = gcd(row * itemsize, mul * itemsize, 16, *(offset * itemsize for offset in offsets))
    return max(width, 4)


def w_copy_bytes(coupling: Coupling, paths: tuple[Path, ...], itemsize: int) -> int:
    """Width of the copies of w columns."""
    offsets = tuple(path.weight_offset or 0 for path in paths)
    return copy_bytes(coupling.weight_numel, offsets, paths[0].mul1, itemsize)


def x_copy_bytes(coupling: Coupling, path: Path, itemsize: int) -> int:
    """Width of the copies of an x block."""
    return copy_bytes(coupling.dim_in1, (path.in1_offset,), path.mul1, itemsize)


@dataclass(frozen=True)
class SharedPlan:
    """Where the parts lie, in elements from the start of the block's shared memory.

    Attributes:
        tables: M of each role.
        sums: partial sums of y gradients.
        rings: the stages of each role's first warp; those of its other warps follow.
        stages: elements of one stage of each role.
        total: all of it.
    """

    tables: tuple[int, ...]
    sums: int
    rings: tuple[int, ...]
    stages: tuple[int, ...]
    total: int


def plan_shared(coupling: Coupling, terms: TermSet, launch: "Launch") -> SharedPlan:
    """Lay out the shared memory of a launch."""
    at = 0
    tables: list[int] = []
    for role in launch.roles:
        tables.append(at)
        at += table_elements(coupling, terms, role, launch.batch)
    sums = at
    at += sum_elements(coupling, terms, launch.warps, launch.batch)
    rings: list[int] = []
    stages: list[int] = []
    for role in launch.roles:
        rings.append(at)
        stages.append(stage_elements(coupling, terms, role))
        at += role.chunks * launch.stages * stages[-1]
    return SharedPlan(tuple(tables), sums, tuple(rings), tuple(stages), at)
