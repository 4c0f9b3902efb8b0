"""Relaxing a molecule with the trained model, and where GFN2-xTB says it has arrived."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.optimize import BFGS
from jaxtyping import Float

# The mirror image of the chelated enol has its proton on the other oxygen: the same minimum with these atoms swapped.
MIRRORED = [4, 3, 2, 1, 0, 5, 8, 7, 6]


@dataclass(frozen=True)
class Minimum:
    """GFN2's own minimum.

    Attributes:
        atoms: the molecule there.
        energy: in eV.
        hessian: ``[3 num_atoms, 3 num_atoms]`` in eV/A^2.
    """

    atoms: Atoms
    energy: float
    hessian: Float[np.ndarray, "coordinate coordinate"]

    @classmethod
    def read(cls, path: Path) -> "Minimum":
        """Reads what `data/generate.py` wrote."""
        with np.load(path) as file:
            return cls(Atoms(file["numbers"], positions=file["positions"]), float(file["energy"]), file["hessian"])

    def displacement(self, atoms: Atoms) -> Float[np.ndarray, "atom 3"]:
        """What is left between `atoms` and the minimum, in A, after the best rotation and naming of the oxygens."""
        candidates = [superpose(atoms.positions[order], self.atoms.positions) for order in (slice(None), MIRRORED)]
        return min(candidates, key=lambda moved: float(np.sum(moved**2)))

    def energy_estimate(self, atoms: Atoms) -> float:
        """GFN2's energy above the minimum in eV, to second order in the displacement."""
        displacement = self.displacement(atoms).ravel()
        return float(displacement @ self.hessian @ displacement / 2)


def superpose(positions: Float[np.ndarray, "atom 3"], target: Float[np.ndarray, "atom 3"]) -> np.ndarray:
    """``R (positions - centre) - (target - centre)`` with the orthogonal `R` that makes it smallest (Kabsch)."""
    positions = positions - positions.mean(0)
    target = target - target.mean(0)
    left, _, right = np.linalg.svd(positions.T @ target)
    return positions @ (left @ right) - target


def relax(atoms: Atoms, max_force: float = 0.05, max_steps: int = 200) -> tuple[int, bool]:
    """Relaxes `atoms` in place with ASE's BFGS; the number of steps, and whether all forces (eV/A) fell so low."""
    optimizer = BFGS(atoms, logfile=None)
    converged = optimizer.run(fmax=max_force, steps=max_steps)
    return optimizer.get_number_of_steps(), bool(converged)


def gfn2_energy(atoms: Atoms) -> float | None:
    """GFN2's energy in eV, or None where tblite is not installed."""
    try:
        from tblite.ase import TBLite
    except ImportError:
        return None
    copy = atoms.copy()
    copy.calc = TBLite(method="GFN2-xTB", accuracy=0.1, verbosity=0)  # as in data/generate.py
    return float(copy.get_potential_energy())
