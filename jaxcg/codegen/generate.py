"""The whole text of a call, with what the caller must know to launch it."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from jaxcg._coupling import Coupling
from jaxcg._terms import TermSet
from jaxcg.codegen.context import PIECE_EDGES
from jaxcg.codegen.kernel import FIX_UP_THREADS, render_fix_up, render_kernel
from jaxcg.codegen.lower import LoweredRole, lower_role
from jaxcg.codegen.problem import Problem
from jaxcg.codegen.render import Number
from jaxcg.codegen.sums import SUM_EDGES, render_share_sum
from jaxcg.codegen.verify import verify
from jaxcg.schedule import Schedule, plan_shared


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel of a text and how to launch it.

    Attributes:
        name: its symbol.
        threads: threads a block.
        shared_bytes: dynamic shared memory.
        grid: what its blocks are for. "resident": one a multiprocessor, at most one for each piece that there can be.
            "pieces": one for each piece of each role. "rows": one for each `size` rows.
        size: see `grid`.
    """

    name: str
    threads: int
    shared_bytes: int
    grid: Literal["resident", "pieces", "rows"]
    size: int = 1


@dataclass(frozen=True)
class KernelSource:
    """A generated text.

    Attributes:
        text: CUDA C++.
        launches: its kernels, in order.
        zeroed: outputs that must be zero before the first launch.
        scratch_rows: rows of dim_out elements in the first buffer after the outputs, for each piece; 0 for none.
        marks: int32 elements of the buffer after it; 0 for none.
        shares: rows of dim_in2 elements in the last buffer, for each row of the call; 0 for none.
        max_blocks: most blocks of a launch that the text can work with.
        pieces: pieces of each role in a block.
    """

    text: str
    launches: tuple[KernelLaunch, ...]
    zeroed: tuple[int, ...]
    scratch_rows: int
    marks: int
    shares: int
    max_blocks: int
    pieces: tuple[int, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def blocks(self, rows: int) -> int:
        """Most blocks of the main launches of a call of this many rows."""
        return max(1, min(self.max_blocks, rows // (PIECE_EDGES * max(self.pieces))))

    def rows_of_scratch(self, rows: int) -> int:
        """Most pieces of a role of a call of this many rows."""
        return self.blocks(rows) * max(self.pieces)

    def grid(self, launch: KernelLaunch, rows: int) -> int:
        """Most blocks of a launch of a call of this many rows."""
        if launch.grid == "rows":
            return -(-rows // launch.size)
        if launch.grid == "pieces":
            return sum(min(self.max_blocks * pieces, self.rows_of_scratch(rows)) for pieces in self.pieces)
        return self.blocks(rows)


@cache
def prelude() -> str:
    """The fixed device code."""
    return files("jaxcg.codegen").joinpath("prelude/prelude.cuh").read_text()


def generate(
    coupling: Coupling, terms: TermSet, schedule: Schedule, *, indexed: bool, ordered: bool, itemsize: int
) -> KernelSource:
    """Generate the kernels of one call.

    Args:
        coupling: the product: every path channelwise, with an output slot of its own.
        terms: what to compute.
        schedule: how.
        indexed: whether x and z rows go through senders and receivers (the first two buffers).
        ordered: whether edges are read through an order (the third buffer).
        itemsize: 4 for float32, 8 for float64.

    Returns:
        The text. Its kernels take one argument by value: pointers to indices, operands, outputs and scratch, then
        the sizes (edges, x rows, z rows, pieces that scratch has rows for).
    """
    shares = sum(role.chunks for launch in schedule.launches for role in launch.roles)
    problem = Problem(coupling, terms, indexed, ordered, Number(itemsize), shares)
    buffers = problem.num_indices + len(terms.operands) + len(terms.outputs) + problem.num_extras
    body: list[str] = []
    launches: list[KernelLaunch] = []
    columns: list[list[tuple[int, int]]] = []
    held: list[tuple[int, ...]] = []
    for number, launch in enumerate(schedule.launches):
        roles: list[LoweredRole] = []
        for role in launch.roles:
            lowered = lower_role(coupling, terms, role, schedule.compensated)
            verify(lowered.program, entries=len(lowered.entries))
            roles.append(lowered)
        name = f"jaxcg_{number}"
        body += [*render_kernel(problem, schedule, number, tuple(roles), name), ""]
        shared = plan_shared(coupling, terms, launch).total * itemsize
        launches.append(KernelLaunch(name, 32 * launch.warps, shared, "resident"))
        columns += [_columns(lowered, coupling.layout) for lowered in roles]
        held += [lowered.y_components for lowered in roles for _ in range(lowered.role.chunks)]
    if problem.has_scratch:
        name = f"jaxcg_{len(launches)}_fix_up"
        body += [*render_fix_up(problem, schedule, columns, name), ""]
        launches.append(KernelLaunch(name, FIX_UP_THREADS, 16 * FIX_UP_THREADS, "pieces"))
    if problem.has_shares:
        name = f"jaxcg_{len(launches)}_sum_y"
        body += render_share_sum(problem, held, name)
        launches.append(KernelLaunch(name, 256, 0, "rows", SUM_EDGES))
    # Weights of paths that contribute nothing (path weight 0) belong to no path of the coupling: nobody writes them.
    uncovered = sum(path.mul1 for path in coupling.paths) < coupling.weight_numel
    head = [
        "// Generated by jaxcg. Do not edit.",
        f"// {terms!r}",
        f"// {len(coupling.paths)} paths, layout {coupling.layout}, {'graph' if indexed else 'rows'}"
        f"{', edges through an order' if ordered else ''}",
        *(
            f"// launch {n}: "
            + "; ".join(
                f"paths {role.paths}, {role.pieces} pieces a block, {role.chunks} warps a team, C = {role.channels}"
                for role in launch.roles
            )
            for n, launch in enumerate(schedule.launches)
        ),
        prelude(),
        f"typedef {problem.number.name} T;",
        f"struct Args {{ void* buffers[{buffers}]; long long sizes[4]; }};",
        "using namespace jaxcg;",
        "",
    ]
    return KernelSource(
        text="\n".join(head + body) + "\n",
        launches=tuple(launches),
        zeroed=tuple(n for n, out in enumerate(terms.outputs) if out.slot == "x" or (out.slot == "w" and uncovered)),
        scratch_rows=len(problem.outputs("z")) if problem.has_scratch else 0,
        marks=len(columns) * (schedule.max_pieces + 1) if problem.has_scratch else 0,
        shares=len(problem.outputs("y")) * shares if problem.has_shares else 0,
        max_blocks=schedule.max_blocks,
        pieces=tuple(role.pieces for launch in schedule.launches for role in launch.roles),
    )


def _columns(lowered: LoweredRole, layout: str) -> list[tuple[int, int]]:
    """Merged (start, length) ranges of a z row that a role writes."""
    ranges: set[tuple[int, int]] = set()
    role = lowered.role
    for path in lowered.paths:
        components = 2 * path.l3 + 1
        start = 32 * role.channels * role.chunk_start
        count = min(32 * role.channels * (role.chunk_start + role.chunks), path.mul1) - start
        if layout == "ir_mul":
            ranges |= {(path.out_offset + k * path.mul1 + start, count) for k in range(components)}
        else:
            ranges.add((path.out_offset + start * components, count * components))
    merged: list[tuple[int, int]] = []
    for start, length in sorted(ranges):
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged
