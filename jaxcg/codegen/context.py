"""A role within its launch: what the text of its function depends on."""

from dataclasses import dataclass

from jaxcg.codegen.lower import LoweredRole
from jaxcg.codegen.problem import Problem, RoleLayout
from jaxcg.schedule import Launch

# A piece has at least this many edges on average. Fewer, and its start and the fix-up of its first receiver dominate,
# and scratch, a row of z for each piece, would be larger than the weights of a small graph.
PIECE_EDGES = 16


@dataclass(frozen=True)
class RoleContext:
    """A role within its launch.

    Attributes:
        problem: what is computed.
        launch: the kernel.
        lowered: the role.
        name: of its function.
        table: place of the first team's M in shared memory.
        table_size: elements of the M of a team.
        transit: place where values of the first warp pass from lanes to memory.
        transit_size: elements of such a place.
        ring: place of the first warp's stages.
        ring_size: elements of a ring.
        stages: edges whose operands a ring holds; 0 if nothing is copied.
        stage_size: elements of a stage.
        follows: whether its team may have done another role before.
        first_barrier: number of the first team's barrier.
        first_share: number of the first chunk's share of y gradients.
        region: number of its marks of continued receivers.
        max_pieces: most pieces of a role.
        exclusive: whether nobody else writes its rows of x gradients, so that plain stores do.
    """

    problem: Problem
    launch: Launch
    lowered: LoweredRole
    name: str
    table: int
    table_size: int
    transit: int
    transit_size: int
    ring: int
    ring_size: int
    stages: int
    stage_size: int
    follows: bool
    first_barrier: int
    first_share: int
    region: int
    max_pieces: int
    exclusive: bool

    @property
    def layout(self) -> RoleLayout:
        return RoleLayout(self.problem, self.lowered.role, self.lowered.paths)

    @property
    def barrier(self) -> str:
        """Where the warps of a team meet."""
        chunks = self.lowered.role.chunks
        if chunks == 1:
            return "__syncwarp();"
        return f"team_barrier({self.first_barrier} + team, {32 * chunks});"

    def shared(self, place: int, size: int, of_warp: bool) -> str:
        """Pointer to this team's or this warp's place in shared memory."""
        role = self.lowered.role
        number = "team"
        if of_warp and role.chunks > 1:
            chunk = "chunk" if role.chunk_start == 0 else f"(chunk - {role.chunk_start})"
            number = f"(team * {role.chunks} + {chunk})"
        return f"reinterpret_cast<T*>(shared_memory) + {place} + {number} * {size}"
