"""Makes the malonaldehyde data set of `train_forces.py` with GFN2-xTB molecular dynamics.

    pip install tblite 'ase>=3.29'
    python generate.py

Writes, beside this file:

- `train.extxyz`: snapshots of Langevin trajectories at several temperatures, and randomly displaced copies of some.
- `test.extxyz`: snapshots of one more trajectory at 500 K, with its own seed and start.
- `minimum.npz`: GFN2's own minimum (positions, energy) and the Hessian there.

Energies in eV, forces in eV/A, positions in A. Takes about three minutes on one core.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # nine atoms: threads cost more than they bring

import ase.io
import numpy as np
from ase import Atoms, units
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixCom
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import thermalize_momenta
from ase.optimize import BFGS
from tblite.ase import TBLite

TIME_STEP = 0.5  # fs
FRICTION = 0.02  # 1/fs
STEPS_BETWEEN_FRAMES = 160  # 80 fs: several periods of the stretches and bends
EQUILIBRATION_STEPS = 1000  # 0.5 ps, ten times the thermostat's relaxation time

# temperature in K, number of frames, seed
TRAIN_TRAJECTORIES = ((300.0, 80, 11), (500.0, 180, 12), (800.0, 120, 13))
TEST_TRAJECTORY = (500.0, 150, 99)
NUM_DISPLACED = 40
DISPLACEMENT = 0.05  # A, standard deviation per coordinate


def malonaldehyde() -> Atoms:
    """The chelated enol HO-CH=CH-CHO, roughly; the first relaxation does the rest."""
    symbols = "OCCCOHHHH"
    positions = [
        (-1.28, -0.75, 0.0),
        (-1.20, 0.50, 0.0),
        (0.00, 1.20, 0.0),
        (1.20, 0.50, 0.0),
        (1.25, -0.80, 0.0),
        (0.30, -1.10, 0.0),  # the proton between the two oxygens
        (-2.15, 1.05, 0.0),
        (0.00, 2.28, 0.0),
        (2.15, 1.05, 0.0),
    ]
    return Atoms(symbols, positions=positions)


def gfn2() -> TBLite:
    """GFN2-xTB, converged ten times further than its default so that forces are smooth."""
    return TBLite(method="GFN2-xTB", accuracy=0.1, verbosity=0)


def evaluate(atoms: Atoms) -> Atoms:
    """A bare copy of `atoms` that carries GFN2's energy and forces."""
    frame = Atoms(atoms.symbols, positions=atoms.positions)
    frame.calc = gfn2()
    results = {"energy": frame.get_potential_energy(), "forces": frame.get_forces()}
    frame.calc = SinglePointCalculator(frame, **results)
    return frame


def run_trajectory(start: Atoms, temperature: float, num_frames: int, seed: int) -> list[Atoms]:
    """Snapshots of one Langevin trajectory from `start`."""
    rng = np.random.default_rng(seed)
    atoms = start.copy()
    atoms.calc = gfn2()
    atoms.set_constraint(FixCom())
    thermalize_momenta(atoms, temperature, rng=rng)
    dynamics = Langevin(
        atoms,
        TIME_STEP * units.fs,
        temperature_K=temperature,
        friction=FRICTION / units.fs,
        fixcm=False,  # FixCom above does it, and samples the right ensemble
        rng=rng,
    )
    dynamics.run(EQUILIBRATION_STEPS)
    frames = []
    for _ in range(num_frames):
        dynamics.run(STEPS_BETWEEN_FRAMES)
        frames.append(evaluate(atoms))
        frames[-1].info["temperature"] = temperature
        if not is_intact(frames[-1]):
            raise RuntimeError(f"the molecule broke at {temperature:.0f} K; choose another seed than {seed}")
    return frames


def is_intact(frame: Atoms) -> bool:
    """Whether all bonds still hold; the proton may be on either oxygen."""
    bonds = [(0, 1), (1, 2), (2, 3), (3, 4), (1, 6), (2, 7), (3, 8)]
    lengths = frame.get_all_distances()
    to_oxygen = min(lengths[5, 0], lengths[5, 4])
    return bool(max(lengths[i, j] for i, j in bonds) < 1.9 and to_oxygen < 1.5)


def displace(frames: list[Atoms], count: int, seed: int) -> list[Atoms]:
    """Copies of `count` of the frames with Gaussian noise on every coordinate."""
    rng = np.random.default_rng(seed)
    displaced = []
    for index in rng.choice(len(frames), size=count, replace=False):
        atoms = frames[index].copy()
        atoms.positions += rng.normal(scale=DISPLACEMENT, size=atoms.positions.shape)
        displaced.append(evaluate(atoms))
        displaced[-1].info["temperature"] = 0.0  # none: not a sample of an ensemble
    return displaced


def hessian(minimum: Atoms, step: float = 0.005) -> np.ndarray:
    """Central differences of GFN2's forces: ``[3 num_atoms, 3 num_atoms]`` in eV/A^2, symmetrised."""
    size = 3 * len(minimum)
    rows = np.zeros((size, size))
    for index in range(size):
        for sign in (1.0, -1.0):
            atoms = minimum.copy()
            atoms.positions[index // 3, index % 3] += sign * step
            rows[index] -= sign * evaluate(atoms).get_forces().ravel() / (2 * step)
    return (rows + rows.T) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    out = parser.parse_args().out

    minimum = malonaldehyde()
    minimum.calc = gfn2()
    BFGS(minimum, logfile=None).run(fmax=1e-4, steps=500)
    print(f"minimum: {minimum.get_potential_energy():.6f} eV, O-H {minimum.get_distance(4, 5):.3f} A")
    curvature = hessian(minimum)
    np.savez(
        out / "minimum.npz",
        numbers=minimum.numbers,
        positions=minimum.positions,
        energy=minimum.get_potential_energy(),
        hessian=curvature,
    )
    print("lowest curvatures, eV/A^2:", np.round(np.linalg.eigvalsh(curvature)[:9], 3))

    train = []
    for temperature, num_frames, seed in TRAIN_TRAJECTORIES:
        train += run_trajectory(minimum, temperature, num_frames, seed)
    train += displace(train, NUM_DISPLACED, seed=14)
    temperature, num_frames, seed = TEST_TRAJECTORY
    test = run_trajectory(displace([minimum], 1, seed)[0], temperature, num_frames, seed)
    for name, frames in (("train", train), ("test", test)):
        ase.io.write(out / f"{name}.extxyz", frames, format="extxyz")
        force_rms = np.sqrt(np.mean([np.square(frame.get_forces()) for frame in frames]))
        print(f"{name}: {len(frames)} frames, force rms {force_rms:.3f} eV/A")


if __name__ == "__main__":
    main()
