"""Frames of one molecule as padded graphs of fixed shape."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ase.io
import numpy as np
from _model import Graph
from ase import Atoms
from jaxtyping import Float, Int


@dataclass(frozen=True)
class Frames:
    """Frames with the same atoms in the same order.

    Attributes:
        numbers: ``[num_atoms]``, atomic numbers.
        positions: ``[num_frames, num_atoms, 3]`` in A.
        energies: ``[num_frames]`` in eV.
        forces: ``[num_frames, num_atoms, 3]`` in eV/A.
    """

    numbers: Int[np.ndarray, " atom"]
    positions: Float[np.ndarray, "frame atom 3"]
    energies: Float[np.ndarray, " frame"]
    forces: Float[np.ndarray, "frame atom 3"]

    def __len__(self) -> int:
        return len(self.energies)

    def atoms(self, index: int) -> Atoms:
        """Frame `index` as an ASE molecule, without its energy and forces."""
        return Atoms(self.numbers, positions=self.positions[index])


def read_frames(path: Path) -> Frames:
    """Reads an extended XYZ file of frames with energies and forces."""
    frames: Sequence[Atoms] = ase.io.read(path, ":")  # type: ignore[assignment]
    return Frames(
        numbers=frames[0].numbers,
        positions=np.stack([frame.positions for frame in frames]),
        energies=np.array([frame.get_potential_energy() for frame in frames]),
        forces=np.stack([frame.get_forces() for frame in frames]),
    )


def neighbor_mask(positions: Float[np.ndarray, "*frame atom 3"], cutoff: float) -> np.ndarray:
    """Which atoms see each other: ``[..., num_atoms (receiver), num_atoms (sender)]``."""
    lengths = np.linalg.norm(positions[..., :, None, :] - positions[..., None, :, :], axis=-1)
    return (lengths < cutoff) & ~np.eye(positions.shape[-2], dtype=bool)


def species_of(numbers: Int[np.ndarray, " atom"], elements: tuple[int, ...]) -> Int[np.ndarray, " atom"]:
    """Each atom's position in `elements`.

    Raises:
        ValueError: for an element that the model was not made for.
    """
    unknown = sorted(set(numbers.tolist()) - set(elements))
    if unknown:
        raise ValueError(f"`numbers` must be among the elements of the model, {elements}, got {unknown}")
    return np.searchsorted(elements, numbers).astype(np.int32)


def build_graph(
    positions: Float[np.ndarray, "frame atom 3"],
    species: Int[np.ndarray, " atom"],
    cutoff: float,
    *,
    num_edges: int,
    num_nodes: int | None = None,
    dtype: np.dtype | type = np.float32,
) -> Graph:
    """The frames as one graph with exactly `num_edges` edges and `num_nodes` nodes, receivers ascending.

    Raises:
        ValueError: if the frames do not fit.
    """
    num_frames, num_atoms = positions.shape[:2]
    num_real = num_frames * num_atoms
    num_nodes = num_real if num_nodes is None else num_nodes
    frame, receiver, sender = np.nonzero(neighbor_mask(positions, cutoff))
    if len(frame) > num_edges or num_real > num_nodes:
        raise ValueError(
            f"`num_edges` and `num_nodes` must be at least {len(frame)} and {num_real}, got {num_edges} and {num_nodes}"
        )
    senders = np.full(num_edges, num_nodes, np.int32)
    receivers = np.full(num_edges, num_nodes, np.int32)
    senders[: len(frame)] = frame * num_atoms + sender
    receivers[: len(frame)] = frame * num_atoms + receiver
    padding = num_nodes - num_real
    return Graph(
        positions=np.concatenate([positions.reshape(-1, 3), np.zeros((padding, 3))]).astype(dtype),
        species=np.pad(np.tile(species, num_frames), (0, padding)),
        frame=np.repeat(np.arange(num_frames + 1, dtype=np.int32), [num_atoms] * num_frames + [padding]),
        senders=senders,
        receivers=receivers,
    )


def edge_capacity(frames: Frames, cutoff: float, batch_size: int) -> int:
    """Enough edges for any `batch_size` of the frames."""
    per_frame = np.sort(neighbor_mask(frames.positions, cutoff).sum((1, 2)))
    return int(per_frame[-batch_size:].sum())


def shuffled_batches(num_frames: int, batch_size: int, seed: int) -> Iterator[Int[np.ndarray, " batch"]]:
    """Endless batches of frame indices, each epoch in a new order."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(num_frames)
        for start in range(0, num_frames - batch_size + 1, batch_size):
            yield order[start : start + batch_size]
