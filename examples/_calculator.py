"""The trained model as an ASE calculator, compiled once for molecules of changing neighbour lists."""

from typing import Any, ClassVar

import jax
import numpy as np
from _data import build_graph, neighbor_mask, species_of
from _model import Graph, energies_and_forces
from _training import Params, Task
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes
from jaxtyping import Array, Float

EDGES_PER_BUCKET = 32
NODES_PER_BUCKET = 16


class EnergyModelCalculator(Calculator):
    """Energy (eV) and forces (eV/A) of a molecule from a trained model.

    The graph is padded to a whole number of buckets of edges and nodes, and never shrinks, so that steps of an
    optimiser whose neighbour lists grow and shrink run the same compiled function.

    Args:
        task: the model and its constants.
        params: its parameters.

    Attributes:
        num_compilations: how often the model was compiled so far.
    """

    implemented_properties: ClassVar[list[str]] = ["energy", "forces"]  # type: ignore[misc]

    def __init__(self, task: Task, params: Params) -> None:
        super().__init__()
        self.task = task
        self.num_compilations = 0
        self._num_edges = 0
        self._num_nodes = 0

        def compute(graph: Graph) -> tuple[Float[Array, " frame"], Float[Array, "node 3"]]:
            self.num_compilations += 1  # Python runs this line only while JAX traces
            return energies_and_forces(task.model, params, graph, 1)

        self._compute = jax.jit(compute)

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: list[str] | None = None,
        system_changes: list[str] = all_changes,
    ) -> None:
        """What ASE calls when positions or atoms have changed."""
        super().calculate(atoms, properties, system_changes)
        assert self.atoms is not None  # set by the line above
        graph = self._pad(self.atoms)
        energies, forces = self._compute(graph)
        results: dict[str, Any] = {
            "energy": float(energies[0]) + self.task.energy_shift,
            "forces": np.asarray(forces, np.float64)[: len(self.atoms)],
        }
        self.results = results

    def _pad(self, atoms: Atoms) -> Graph:
        positions = atoms.positions[None]
        num_edges = int(neighbor_mask(positions, self.task.model.cutoff).sum())
        self._num_edges = max(self._num_edges, round_up(num_edges, EDGES_PER_BUCKET))
        self._num_nodes = max(self._num_nodes, round_up(len(atoms), NODES_PER_BUCKET))
        return build_graph(
            positions,
            species_of(atoms.numbers, self.task.elements),
            self.task.model.cutoff,
            num_edges=self._num_edges,
            num_nodes=self._num_nodes,
            dtype=self.task.dtype,
        )


def round_up(count: int, multiple: int) -> int:
    """The next multiple of `multiple`, at least one."""
    return max(1, -(-count // multiple)) * multiple


def finite_difference_error(atoms: Atoms, step: float) -> float:
    """Largest difference between the calculator's forces and ``-dE/dx`` from its energies, in eV/A.

    The five-point stencil: its own error falls as ``step^4``, and the energies' rounding grows as ``1 / step``. Both
    are small at 0.01 A in float32, and at 0.001 A in float64.
    """
    forces = atoms.get_forces()
    differences = np.zeros_like(forces)
    for index in np.ndindex(*forces.shape):
        for offset, weight in ((-2, 1), (-1, -8), (1, 8), (2, -1)):
            moved = atoms.copy()
            moved.calc = atoms.calc
            moved.positions[index] += offset * step
            differences[index] -= weight * moved.get_potential_energy() / (12 * step)
    return float(np.abs(differences - forces).max())
