"""Learns the energies and forces of malonaldehyde, then relaxes a distorted molecule with the learned model.

    python examples/train_forces.py

The data are a few hundred frames of GFN2-xTB molecular dynamics (`data/README.md`); the model is NequIP-style, in Flax,
with one `jaxcg` convolution per layer (`_model.py`). With a CUDA GPU the convolutions run as generated kernels, without
one through XLA; the command is the same. Writes `parity.png` and `learning_curve.png`.
"""

import argparse
import time
from pathlib import Path

import jax
import numpy as np
from _calculator import EnergyModelCalculator, finite_difference_error
from _data import Frames, neighbor_mask, read_frames
from _model import EnergyModel, convolution_path
from _plots import plot_learning_curve, plot_parity
from _relax import Minimum, gfn2_energy, relax
from _training import Errors, Params, Task, make_predict, train
from tqdm import tqdm

EXAMPLES = Path(__file__).parent


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=2000, help="training steps (default %(default)s)")
    add("--batch-size", type=int, default=10, help="frames per step (default %(default)s)")
    add("--report-every", type=int, default=100, help="steps between held-out errors (default %(default)s)")
    add("--learning-rate", type=float, default=0.01, help="peak learning rate (default %(default)s)")
    add("--energy-weight", type=float, default=10.0, help="weight of energies per atom (default %(default)s)")
    add("--average", type=float, default=0.99, help="decay of the mean of the parameters (default %(default)s)")
    add("--channels", type=int, default=16, help="multiplicity of every irrep (default %(default)s)")
    add("--max-degree", type=int, default=2, help="largest l (default %(default)s)")
    add("--layers", type=int, default=3, help="message-passing layers (default %(default)s)")
    add("--cutoff", type=float, default=4.0, help="in A (default %(default)s)")
    add("--float64", action="store_true", help="train in float64")
    add("--impl", choices=("auto", "cuda", "xla"), default="auto", help="path of the convolutions")
    add("--frame", type=int, default=0, help="held-out frame to distort and relax (default %(default)s)")
    add("--distortion", type=float, default=0.1, help="noise on its coordinates in A (default %(default)s)")
    add("--seed", type=int, default=0, help="of parameters, batches and distortion (default %(default)s)")
    add("--data", type=Path, default=EXAMPLES / "data", help="folder of the data set")
    add("--out", type=Path, default=Path("train_forces_out"), help="folder of the pictures (default %(default)s)")
    parsed = parser.parse_args(arguments)
    if parsed.steps < 1 or parsed.report_every < 1:
        parser.error("--steps and --report-every must be at least 1")
    return parsed


def make_task(frames: Frames, arguments: argparse.Namespace) -> Task:
    """The model, with the constants that come from the training frames."""
    elements = tuple(sorted(set(frames.numbers.tolist())))
    neighbors = neighbor_mask(frames.positions, arguments.cutoff).sum(-1)
    model = EnergyModel(
        num_species=len(elements),
        cutoff=arguments.cutoff,
        average_neighbors=float(neighbors.mean()),
        energy_scale=float(np.sqrt(np.mean(frames.forces**2))),
        channels=arguments.channels,
        max_degree=arguments.max_degree,
        num_layers=arguments.layers,
        impl=arguments.impl,
    )
    dtype = np.float64 if arguments.float64 else np.float32
    return Task(model, elements, float(frames.energies.mean()), dtype)


def fit(task: Task, train_frames: Frames, test_frames: Frames, arguments: argparse.Namespace) -> Params:
    """Trains, prints held-out errors, draws both pictures; returns the parameters."""
    mean = Errors.of(test_frames, np.asarray(task.energy_shift), train_frames.forces.mean((0, 1)))
    predict = make_predict(task, test_frames, arguments.batch_size)
    chunk_size = min(arguments.report_every, arguments.steps)
    num_chunks = -(-arguments.steps // chunk_size)
    chunks = train(
        task,
        train_frames,
        num_steps=num_chunks * chunk_size,
        chunk_size=chunk_size,
        batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        energy_weight=arguments.energy_weight,
        decay=arguments.average,
        seed=arguments.seed,
    )
    params, losses, force_errors = None, [], []
    with tqdm(total=num_chunks * chunk_size, unit="step", desc="training (compiling first)") as bar:
        for params, chunk_losses in chunks:
            losses.append(chunk_losses)
            force_errors.append(Errors.of(test_frames, *predict(params)).force_mae)
            bar.set_description("training")
            bar.set_postfix(loss=f"{chunk_losses.mean():.4f}", held_out=f"{force_errors[-1]:.3f} eV/A")
            bar.update(chunk_size)

    energies, forces = predict(params)
    errors = Errors.of(test_frames, energies, forces)
    print(f"\n{len(test_frames)} held-out frames, a separate trajectory at 500 K:")
    print(f"{'':22}{'model':>10}{'mean predictor':>17}{'ratio':>8}")
    for name, unit, field in (
        ("energy MAE", "meV/atom", "energy_mae"),
        ("energy RMSE", "meV/atom", "energy_rmse"),
        ("force MAE", "eV/A", "force_mae"),
        ("force RMSE", "eV/A", "force_rmse"),
    ):
        ours, theirs = getattr(errors, field), getattr(mean, field)
        print(f"{name + ' (' + unit + ')':22}{ours:10.4f}{theirs:17.4f}{theirs / ours:8.1f}")

    arguments.out.mkdir(parents=True, exist_ok=True)
    steps = chunk_size * np.arange(1, num_chunks + 1)
    plot_parity(arguments.out / "parity.png", test_frames, energies, forces)
    curve = arguments.out / "learning_curve.png"
    plot_learning_curve(curve, np.concatenate(losses), steps, np.array(force_errors), mean.force_mae)
    print(f"wrote {arguments.out / 'parity.png'} and {curve}")
    return params


def relax_distorted(task: Task, params: Params, frames: Frames, arguments: argparse.Namespace) -> None:
    """Distorts a held-out frame, checks its forces, relaxes it, and says how far GFN2 is from its minimum there."""
    atoms = frames.atoms(arguments.frame)
    atoms.positions += np.random.default_rng(arguments.seed).normal(scale=arguments.distortion, size=(len(atoms), 3))
    calculator = EnergyModelCalculator(task, params)
    atoms.calc = calculator
    minimum = Minimum.read(arguments.data / "minimum.npz")

    largest = np.abs(atoms.get_forces()).max()
    print(f"\nheld-out frame {arguments.frame}, each coordinate moved by {arguments.distortion} A (rms):")
    difference = finite_difference_error(atoms, step=0.001 if arguments.float64 else 0.01)
    print(f"  forces against -dE/dx by finite differences: {difference:.1e} eV/A apart at most,")
    print(f"  with force components up to {largest:.2f} eV/A")
    start = atoms.copy()
    num_steps, converged = relax(atoms)
    max_force = np.linalg.norm(atoms.get_forces(), axis=-1).max()
    outcome = "converged" if converged else "NOT converged"
    compilations = calculator.num_compilations
    print(f"  BFGS {outcome} in {num_steps} steps, fmax {max_force:.3f} eV/A; model compiled {compilations} time(s)")
    rmsd = [np.sqrt(np.mean(np.sum(minimum.displacement(each) ** 2, axis=-1))) for each in (start, atoms)]
    print(f"  distance to GFN2's minimum (RMSD): {rmsd[0]:.3f} A before, {rmsd[1]:.3f} A after")
    print(f"  GFN2's energy above its minimum, from its Hessian there: {minimum.energy_estimate(atoms):.4f} eV")
    energy = gfn2_energy(atoms)
    if energy is None:
        print("  (pip install tblite, and GFN2 itself is asked too)")
    else:
        before = gfn2_energy(start)
        assert before is not None  # tblite is there
        print(f"  GFN2's energy above its minimum, from tblite: {energy - minimum.energy:.4f} eV", end="")
        print(f" ({before - minimum.energy:.3f} eV before)")


def main(arguments: list[str] | None = None) -> None:
    """Trains, reports, relaxes."""
    start = time.perf_counter()
    parsed = parse_arguments(arguments)
    jax.config.update("jax_enable_x64", parsed.float64)
    # A GPU would otherwise round the operands of float32 matrix products to 10 bits; forces would be noisy.
    jax.config.update("jax_default_matmul_precision", "highest")
    train_frames, test_frames = (read_frames(parsed.data / f"{name}.extxyz") for name in ("train", "test"))
    task = make_task(train_frames, parsed)
    print(f"{len(train_frames)} training frames; convolutions: {convolution_path(task.model)}")
    params = fit(task, train_frames, test_frames, parsed)
    relax_distorted(task, params, test_frames, parsed)
    print(f"\nwall time {time.perf_counter() - start:.0f} s, imports not counted")


if __name__ == "__main__":
    main()
