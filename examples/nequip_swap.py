"""Swap the message passing of a NequIP-style layer for one `jaxcg` convolution, and compare energy and forces.

`Layer` is written as such layers are with e3nn-jax: gather, tensor product with a filter, regroup, times the radial
weights, scatter, over the root of the number of neighbours. `SwappedLayer` replaces those lines by
`jaxcg.e3nn.convolve` and touches nothing else: the parameters are the same, name by name.

    python examples/nequip_swap.py            # float32
    python examples/nequip_swap.py --float64
"""

import argparse
from dataclasses import dataclass
from typing import Any

import e3nn_jax as e3nn
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import jaxcg.e3nn

CUTOFF = 3.0
NUM_SPECIES = 3


class Layer(nn.Module):
    """One NequIP interaction on e3nn-jax.

    Attributes:
        irreps_out: irreps of the new node features.
        average_neighbors: mean number of neighbours.
        hidden: widths of the hidden layers of the radial network.
    """

    irreps_out: str
    average_neighbors: float
    hidden: tuple[int, ...] = (16,)

    @nn.compact
    def __call__(
        self,
        x: e3nn.IrrepsArray,
        harmonics: e3nn.IrrepsArray,
        radial: Float[Array, "edge radial"],
        species: Int[Array, " node"],
        senders: Int[Array, " edge"],
        receivers: Int[Array, " edge"],
    ) -> e3nn.IrrepsArray:
        """New node features, ``[num_nodes, irreps_out.dim]``."""
        irreps = e3nn.Irreps(self.irreps_out)
        gates = irreps.filter(drop="0e + 0o").num_irreps
        irreps = (e3nn.Irreps(f"{gates}x0e") + irreps).regroup()
        skip = e3nn.flax.Linear(irreps, num_indexed_weights=NUM_SPECIES, force_irreps_out=True, name="skip")(species, x)
        x = e3nn.flax.Linear(x.irreps, name="up")(x)
        x = self.pass_messages(x, harmonics, radial, senders, receivers, [ir for _, ir in irreps])
        x = e3nn.flax.Linear(irreps, force_irreps_out=True, name="down")(x) + skip
        return e3nn.gate(x, even_act=nn.silu, odd_act=nn.tanh, even_gate_act=nn.silu)

    def pass_messages(
        self,
        x: e3nn.IrrepsArray,
        harmonics: e3nn.IrrepsArray,
        radial: Float[Array, "edge radial"],
        senders: Int[Array, " edge"],
        receivers: Int[Array, " edge"],
        keep: list[e3nn.Irrep],
    ) -> e3nn.IrrepsArray:
        """The lines that are swapped."""
        messages = e3nn.tensor_product(x[senders], harmonics, filter_ir_out=keep).regroup()
        mix = self.radial_network(messages.irreps.num_irreps)(radial)
        messages = messages * mix
        return e3nn.scatter_sum(messages, dst=receivers, output_size=x.shape[0]) / self.average_neighbors**0.5

    def radial_network(self, features: int) -> nn.Module:
        """Weights of the messages from radial features."""
        return e3nn.flax.MultiLayerPerceptron((*self.hidden, features), nn.silu, output_activation=False, name="radial")


class SwappedLayer(Layer):
    """The same layer with its message passing in one `jaxcg` convolution: no per-edge message is ever in memory."""

    def pass_messages(
        self,
        x: e3nn.IrrepsArray,
        harmonics: e3nn.IrrepsArray,
        radial: Float[Array, "edge radial"],
        senders: Int[Array, " edge"],
        receivers: Int[Array, " edge"],
        keep: list[e3nn.Irrep],
    ) -> e3nn.IrrepsArray:
        """The swap."""
        irreps = jaxcg.e3nn.message_irreps(x.irreps, harmonics.irreps, keep)
        mix = self.radial_network(irreps.num_irreps)(radial)
        return jaxcg.e3nn.convolve(
            x,
            harmonics,
            mix,
            senders,
            receivers,
            num_nodes=x.shape[0],
            filter_ir_out=keep,
            scale=self.average_neighbors**-0.5,
        )


class Model(nn.Module):
    """Two interactions and a readout.

    Attributes:
        layer: `Layer` or `SwappedLayer`.
        average_neighbors: mean number of neighbours.
    """

    layer: type[Layer]
    average_neighbors: float

    @nn.compact
    def __call__(
        self,
        positions: Float[Array, "node 3"],
        species: Int[Array, " node"],
        senders: Int[Array, " edge"],
        receivers: Int[Array, " edge"],
    ) -> Float[Array, ""]:
        """The energy."""
        vectors = e3nn.IrrepsArray("1o", positions[receivers] - positions[senders])
        lengths = jnp.linalg.norm(vectors.array, axis=-1)
        radial = e3nn.bessel(lengths, 8, CUTOFF) * e3nn.poly_envelope(5, 2, CUTOFF)(lengths)[:, None]
        harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", vectors, normalize=True, normalization="component")
        x = e3nn.IrrepsArray("16x0e", nn.Embed(NUM_SPECIES, 16, param_dtype=positions.dtype, name="embed")(species))
        for number, irreps in enumerate(("16x0e + 8x0o + 8x1o + 8x1e + 4x2e", "16x0e")):
            layer = self.layer(irreps, self.average_neighbors, name=f"layer_{number}")
            x = layer(x, harmonics, radial, species, senders, receivers)
        return jnp.sum(e3nn.flax.Linear("0e", name="readout")(x).array)


@dataclass(frozen=True)
class Comparison:
    """Energy and forces of the two models with the same parameters, on the same atoms."""

    energy: float
    swapped_energy: float
    forces: Float[np.ndarray, "node 3"]
    swapped_forces: Float[np.ndarray, "node 3"]

    @property
    def energy_error(self) -> float:
        """Relative difference of the energies."""
        return abs(self.energy - self.swapped_energy) / abs(self.energy)

    @property
    def force_error(self) -> float:
        """Largest difference of a force component over the largest component."""
        return float(np.abs(self.forces - self.swapped_forces).max() / np.abs(self.forces).max())


def cluster(side: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Positions, species, senders and receivers of ``side**3`` atoms on a shaken cubic lattice."""
    rng = np.random.default_rng(seed)
    lattice = np.stack(np.meshgrid(*[np.arange(side)] * 3), axis=-1).reshape(-1, 3)
    positions = 1.7 * lattice + rng.normal(scale=0.15, size=lattice.shape)
    distances = np.linalg.norm(positions[:, None] - positions[None], axis=-1)
    receivers, senders = np.nonzero((distances < CUTOFF) & (distances > 0))
    return positions, rng.integers(0, NUM_SPECIES, len(positions)), senders, receivers


def compare(dtype: Any = jnp.float32, side: int = 3, seed: int = 0) -> Comparison:
    """Evaluate both models.

    Args:
        dtype: float32, or float64 (with ``jax_enable_x64``).
        side: atoms along each edge of the cluster.
        seed: of atoms and parameters.

    Returns:
        `Comparison`.
    """
    positions, species, senders, receivers = cluster(side, seed)
    positions = jnp.asarray(positions, dtype)
    species, senders, receivers = map(jnp.asarray, (species, senders, receivers))
    average = len(receivers) / len(positions)
    original, swapped = Model(Layer, average), Model(SwappedLayer, average)
    params = original.init(jax.random.key(seed), positions, species, senders, receivers)
    params = jax.tree.map(lambda parameter: parameter.astype(dtype), params)

    results = []
    for model in (original, swapped):

        def energy(positions: Float[Array, "node 3"], model: Model = model) -> Float[Array, ""]:
            return model.apply(params, positions, species, senders, receivers)  # type: ignore[return-value]

        value, gradient = jax.jit(jax.value_and_grad(energy))(positions)
        results.append((float(value), -np.asarray(gradient)))
    (energy_a, forces_a), (energy_b, forces_b) = results
    return Comparison(energy_a, energy_b, forces_a, forces_b)


def main(argv: list[str] | None = None) -> Comparison:
    """Print the comparison and return it."""
    parser = argparse.ArgumentParser(description="Swap e3nn-jax message passing for a jaxcg convolution.")
    parser.add_argument("--float64", action="store_true", help="compute in float64")
    parser.add_argument("--side", type=int, default=3, help="atoms along each edge of the cluster (default: 3)")
    arguments = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", arguments.float64)
    dtype = jnp.float64 if arguments.float64 else jnp.float32
    result = compare(dtype, arguments.side)
    print(f"{arguments.side**3} atoms, {np.dtype(dtype)}, on {jax.devices()[0].platform}")
    print(f"energy: e3nn-jax {result.energy:.12g}, jaxcg {result.swapped_energy:.12g}")
    print(f"relative difference of the energies: {result.energy_error:.1e}")
    print(f"largest difference of a force component, over the largest component: {result.force_error:.1e}")
    return result


if __name__ == "__main__":
    main()
