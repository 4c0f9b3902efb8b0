"""The training example: its parts at small size, and the whole of it with a handful of steps."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_forces  # noqa: E402
from _calculator import EnergyModelCalculator, finite_difference_error  # noqa: E402
from _data import Frames, build_graph, edge_capacity, read_frames, species_of  # noqa: E402
from _model import Graph, energies_and_forces  # noqa: E402
from _relax import Minimum, gfn2_energy  # noqa: E402
from _training import Params, Task  # noqa: E402

from tests.emulator import emulated  # noqa: E402

SMALL = ["--channels", "3", "--layers", "2", "--max-degree", "1"]
NUM_FRAMES = 2


@pytest.fixture(scope="module", autouse=True)
def float64() -> Iterator[None]:
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(scope="module")
def frames() -> Frames:
    return read_frames(EXAMPLES / "data" / "test.extxyz")


@pytest.fixture(scope="module")
def task(frames: Frames) -> Task:
    return train_forces.make_task(frames, train_forces.parse_arguments([*SMALL, "--float64"]))


@pytest.fixture(scope="module")
def params(task: Task, frames: Frames) -> Params:
    return task.initial_params(frames, seed=0)


@pytest.fixture(scope="module")
def exact(task: Task, frames: Frames) -> Graph:
    """Two frames without any padding."""
    edges = edge_capacity(frames, task.model.cutoff, len(frames)) // len(frames)
    for num_edges in range(edges // 2, 3 * NUM_FRAMES * edges):
        try:
            return task.graph(frames, np.arange(NUM_FRAMES), num_edges)
        except ValueError:  # too few
            continue
    raise AssertionError("no number of edges fits")


def with_outside_edges(graph: Graph, count: int) -> Graph:
    """Padding edges whose indices lie outside the graph."""
    outside = np.full(count, graph.positions.shape[0], np.int32)
    return graph._replace(
        senders=np.concatenate([graph.senders, outside]), receivers=np.concatenate([graph.receivers, outside])
    )


def with_dummy_node(graph: Graph, count: int) -> Graph:
    """One more node, in no frame, and padding edges of zero length from it to itself."""
    return with_outside_edges(graph, count)._replace(
        positions=np.concatenate([graph.positions, np.zeros((1, 3))]),
        species=np.append(graph.species, np.int32(0)),
        frame=np.append(graph.frame, np.int32(NUM_FRAMES)),
    )


def outputs(task: Task, params: Params, graph: Graph) -> dict[str, jax.Array | dict]:
    """Energies, forces of the real atoms, and the parameter gradient of a loss over both."""
    num_atoms = 9 * NUM_FRAMES

    def loss(params: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        energies, forces = energies_and_forces(task.model, params, graph, NUM_FRAMES)
        return jnp.sum(energies**2) + jnp.sum(forces[:num_atoms] ** 2), (energies, forces[:num_atoms])

    gradient, (energies, forces) = jax.jit(jax.grad(loss, has_aux=True))(params)
    return {"energies": energies, "forces": forces, "gradient": gradient}


@pytest.fixture(scope="module")
def expected(task: Task, params: Params, exact: Graph) -> dict[str, jax.Array | dict]:
    return outputs(task, params, exact)


@pytest.mark.parametrize("pad", [with_outside_edges, with_dummy_node], ids=["outside", "dummy_node"])
def test_padding_changes_nothing(
    task: Task,
    params: Params,
    exact: Graph,
    expected: dict[str, jax.Array | dict],
    pad: Callable[[Graph, int], Graph],
) -> None:
    actual = outputs(task, params, pad(exact, 5))
    for key, value in expected.items():
        for left, right in zip(jax.tree.leaves(actual[key]), jax.tree.leaves(value), strict=True):
            assert np.isfinite(right).all()
            scale = np.abs(right).max()
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-12 * scale, err_msg=key)


def test_forces_are_minus_the_gradient(task: Task, params: Params, frames: Frames) -> None:
    atoms = frames.atoms(0)
    atoms.calc = EnergyModelCalculator(task, params)
    # Five-point stencil in float64: step^4 of the fifth derivative, and eps / step, both far below this.
    assert finite_difference_error(atoms, step=1e-3) < 1e-7 * np.abs(atoms.get_forces()).max()


def test_calculator_follows_rotation_and_reflection_without_compiling_again(
    task: Task, params: Params, frames: Frames
) -> None:
    atoms = frames.atoms(0)
    calculator = EnergyModelCalculator(task, params)
    atoms.calc = calculator
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    rotation, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))
    for orthogonal in (rotation, -rotation):
        atoms.positions = frames.positions[0] @ orthogonal.T
        assert atoms.get_potential_energy() == pytest.approx(energy, abs=1e-9)
        np.testing.assert_allclose(atoms.get_forces(), forces @ orthogonal.T, atol=1e-9)
    num_edges = set()
    for scale in (0.98, 1.0, 1.02):
        atoms.positions = scale * frames.positions[0]
        atoms.get_forces()
        num_edges.add(int((atoms.get_all_distances() < task.model.cutoff).sum()))
    assert len(num_edges) > 1, "the neighbour list should have changed"
    assert calculator.num_compilations == 1


def test_unknown_element_is_named() -> None:
    with pytest.raises(ValueError, match=r"elements of the model, \(1, 6, 8\), got \[7\]"):
        species_of(np.array([1, 7]), (1, 6, 8))


def test_too_small_a_graph_is_refused(frames: Frames) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        build_graph(frames.positions[:1], np.zeros(9, np.int32), 4.0, num_edges=3)


def test_data_set(frames: Frames) -> None:
    train = read_frames(EXAMPLES / "data" / "train.extxyz")
    assert np.sqrt(np.mean(frames.forces**2)) > 0.8
    assert sum(path.stat().st_size for path in (EXAMPLES / "data").iterdir() if path.is_file()) < 2_000_000
    assert np.array_equal(train.numbers, frames.numbers)
    # No frame of one set is a near copy of one of the other.
    distances = np.abs(train.positions[:, None] - frames.positions[None]).max((2, 3))
    assert distances.min() > 0.05


def test_minimum_is_found_again_under_rotation_and_renaming() -> None:
    minimum = Minimum.read(EXAMPLES / "data" / "minimum.npz")
    rotation, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))
    atoms = minimum.atoms[[4, 3, 2, 1, 0, 5, 8, 7, 6]]
    atoms.positions = atoms.positions @ rotation + 1.0
    np.testing.assert_allclose(minimum.displacement(atoms), 0, atol=1e-12)
    assert minimum.energy_estimate(atoms) == pytest.approx(0, abs=1e-12)
    energy = gfn2_energy(atoms)
    assert energy is None or energy == pytest.approx(minimum.energy, abs=1e-6)


def test_the_whole_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = ["--layers", "1", "--steps", "4", "--report-every", "2", "--batch-size", "4", "--float64"]
    train_forces.main([*SMALL, *steps, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    for line in ("force MAE", "mean predictor", "finite differences", "BFGS", "GFN2's energy above its minimum"):
        assert line in printed
    for name in ("parity.png", "learning_curve.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_kernels_give_the_same_training_gradient(task: Task, params: Params, exact: Graph) -> None:
    # What a GPU runs: forward, forces and the gradient of a loss of forces, each order through generated kernels.
    def loss(params: Params) -> jax.Array:
        energies, forces = energies_and_forces(task.model, params, exact, NUM_FRAMES)
        return jnp.sum(energies**2) + jnp.sum(forces**2)

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    with emulated():
        lowered = jax.jit(jax.value_and_grad(loss)).lower(params)
        assert lowered.as_text().count("@jaxcg_launch") >= 3
        kernel_value, kernel_gradient = lowered.compile()(params)
        np.testing.assert_allclose(kernel_value, value, rtol=1e-12)
        for got, expected in zip(jax.tree.leaves(kernel_gradient), jax.tree.leaves(gradient), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12 * float(jnp.abs(expected).max()))
