"""Fitting the model to energies and forces: batches, the compiled training loop, predictions, errors."""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _data import Frames, build_graph, edge_capacity, shuffled_batches, species_of
from _model import AnyArray, EnergyModel, Graph, energies_and_forces
from jaxtyping import Array, Float

Params = Any  # the tree of arrays that Flax makes


class Batch(NamedTuple):
    """A graph with its labels; with a leading axis, several of them."""

    graph: Graph
    energies: Float[AnyArray, " frame"]
    forces: Float[AnyArray, "node 3"]


class TrainState(NamedTuple):
    """What a training step changes. `average` is the running mean of the parameters, which the model is used with."""

    params: Params
    average: Params
    optimizer: optax.OptState


@dataclass(frozen=True)
class Task:
    """The model and the constants that come with it.

    Attributes:
        model: the network.
        elements: atomic numbers in the order of its species.
        energy_shift: eV, added to what the network gives: in float32 only the rest of the energy keeps its digits.
        dtype: of the network's inputs, parameters and outputs.
    """

    model: EnergyModel
    elements: tuple[int, ...]
    energy_shift: float
    dtype: type = np.float32

    def graph(self, frames: Frames, indices: np.ndarray, num_edges: int) -> Graph:
        """The chosen frames as one graph of `num_edges` edges."""
        species = species_of(frames.numbers, self.elements)
        positions = frames.positions[indices]
        return build_graph(positions, species, self.model.cutoff, num_edges=num_edges, dtype=self.dtype)

    def batch(self, frames: Frames, indices: np.ndarray, num_edges: int) -> Batch:
        """The chosen frames with their labels."""
        energies = (frames.energies[indices] - self.energy_shift).astype(self.dtype)
        forces = frames.forces[indices].reshape(-1, 3).astype(self.dtype)
        return Batch(self.graph(frames, indices, num_edges), energies, forces)

    def initial_params(self, frames: Frames, seed: int) -> Params:
        """Random parameters."""
        graph = self.graph(frames, np.arange(1), edge_capacity(frames, self.model.cutoff, 1))
        return jax.jit(self.model.init, static_argnums=2)(jax.random.key(seed), graph, 1)


def make_optimizer(learning_rate: float, num_steps: int) -> optax.GradientTransformation:
    """Adam with a short warm-up, a cosine decay to nothing, and clipped gradients."""
    schedule = optax.warmup_cosine_decay_schedule(
        learning_rate / 10, learning_rate, min(50, num_steps // 10), num_steps, learning_rate / 1000
    )
    return optax.chain(optax.clip_by_global_norm(10.0), optax.adam(schedule))


def make_train_chunk(
    model: EnergyModel, optimizer: optax.GradientTransformation, energy_weight: float, decay: float
) -> Callable[[TrainState, Batch], tuple[TrainState, Float[Array, " step"]]]:
    """A compiled function that takes one step per batch of a stack and gives their losses.

    The loss is ``mean |dF|^2 + energy_weight mean (dE / num_atoms)^2``, both over ``energy_scale^2``.
    """

    def loss(params: Params, batch: Batch) -> Float[Array, ""]:
        num_frames = batch.energies.shape[0]
        energies, forces = energies_and_forces(model, params, batch.graph, num_frames)
        energy_errors = (energies - batch.energies) / (forces.shape[0] / num_frames)
        errors = jnp.mean((forces - batch.forces) ** 2) + energy_weight * jnp.mean(energy_errors**2)
        return errors / model.energy_scale**2

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Float[Array, ""]]:
        value, gradient = jax.value_and_grad(loss)(state.params, batch)
        updates, opt_state = optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        average = optax.incremental_update(params, state.average, 1 - decay)
        return TrainState(params, average, opt_state), value

    # The loop is inside the compiled function, so that a chunk of steps costs one dispatch.
    return jax.jit(lambda state, batches: jax.lax.scan(step, state, batches), donate_argnums=0)


def train(
    task: Task,
    frames: Frames,
    *,
    num_steps: int,
    chunk_size: int,
    batch_size: int,
    learning_rate: float,
    energy_weight: float,
    decay: float,
    seed: int,
) -> Iterator[tuple[Params, np.ndarray]]:
    """Trains, and after every `chunk_size` steps yields the averaged parameters and the chunk's losses."""
    num_edges = edge_capacity(frames, task.model.cutoff, batch_size)
    optimizer = make_optimizer(learning_rate, num_steps)
    train_chunk = make_train_chunk(task.model, optimizer, energy_weight, decay)
    params = task.initial_params(frames, seed)
    state = TrainState(params, jax.tree.map(jnp.copy, params), optimizer.init(params))
    batches = shuffled_batches(len(frames), batch_size, seed)
    for _ in range(num_steps // chunk_size):
        chunk = [task.batch(frames, indices, num_edges) for indices in itertools.islice(batches, chunk_size)]
        state, losses = train_chunk(state, jax.tree.map(lambda *leaves: np.stack(leaves), *chunk))
        yield state.average, np.asarray(losses)


def make_predict(task: Task, frames: Frames, batch_size: int) -> Callable[[Params], tuple[np.ndarray, np.ndarray]]:
    """A function from parameters to energies ``[num_frames]`` and forces ``[num_frames, num_atoms, 3]`` of `frames`."""
    num_edges = edge_capacity(frames, task.model.cutoff, batch_size)
    compute = jax.jit(functools.partial(energies_and_forces, task.model), static_argnums=2)
    # The last graph is filled up from the front.
    starts = range(0, len(frames), batch_size)
    graphs = [task.graph(frames, np.arange(start, start + batch_size) % len(frames), num_edges) for start in starts]

    def predict(params: Params) -> tuple[np.ndarray, np.ndarray]:
        results = [compute(params, graph, batch_size) for graph in graphs]
        energies = np.concatenate([np.asarray(energy, np.float64) for energy, _ in results])
        forces = np.concatenate([np.asarray(force, np.float64) for _, force in results])
        return energies[: len(frames)] + task.energy_shift, forces.reshape(-1, *frames.forces.shape[1:])[: len(frames)]

    return predict


@dataclass(frozen=True)
class Errors:
    """Errors of energies (meV per atom) and force components (eV/A)."""

    energy_mae: float
    energy_rmse: float
    force_mae: float
    force_rmse: float

    @classmethod
    def of(cls, frames: Frames, energies: np.ndarray, forces: np.ndarray) -> "Errors":
        """The errors of predicted `energies` and `forces`; both broadcast."""
        energy_errors = 1000 * (energies - frames.energies) / len(frames.numbers)
        force_errors = forces - frames.forces
        return cls(
            energy_mae=float(np.abs(energy_errors).mean()),
            energy_rmse=float(np.sqrt(np.mean(energy_errors**2))),
            force_mae=float(np.abs(force_errors).mean()),
            force_rmse=float(np.sqrt(np.mean(force_errors**2))),
        )
