"""A NequIP-style energy model in Flax whose message passing is one `jaxcg` convolution per layer."""

from typing import Literal, NamedTuple, cast

import e3nn_jax as e3nn
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import jaxcg
from jaxcg.flax.linen import Convolution

AnyArray = Array | np.ndarray  # graphs are built with numpy


class Graph(NamedTuple):
    """A batch of frames as one disjoint graph of fixed shape, padded at its end.

    A padding edge has its sender and receiver at `num_nodes`, outside the graph, where the convolution does not see it.
    A padding node has `frame` at `num_frames`, where the sum over atoms does not see it.

    Attributes:
        positions: ``[num_nodes, 3]`` in A.
        species: ``[num_nodes]``, positions in the model's list of elements.
        frame: ``[num_nodes]``, the frame each atom belongs to.
        senders: ``[num_edges]``.
        receivers: ``[num_edges]``, ascending.
    """

    positions: Float[AnyArray, "node 3"]
    species: Int[AnyArray, " node"]
    frame: Int[AnyArray, " node"]
    senders: Int[AnyArray, " edge"]
    receivers: Int[AnyArray, " edge"]


class EnergyModel(nn.Module):
    """Energies of all frames of a graph.

    Each layer is NequIP's: ``x' = gate(linear(convolution(linear(x), Y, R)) + self_connection(x, species))``, where the
    convolution sums ``R(r) (x[sender] (x) Y(r))`` over the neighbours and `R` is a small network of radial functions.
    The last layer keeps scalars alone, which a linear map turns into one energy per atom.

    Attributes:
        num_species: number of elements.
        cutoff: distance in A beyond which atoms do not see each other.
        average_neighbors: mean number of neighbours, which normalises the sums.
        energy_scale: eV per unit of the network's output, about the rms force in eV/A.
        channels: multiplicity of every irrep of the node features.
        max_degree: largest l of features and spherical harmonics.
        num_layers: number of message-passing layers.
        num_radial: number of Bessel functions.
        hidden: widths of the hidden layers of the radial network.
        impl: which path the convolutions take, ``"auto"``, ``"cuda"`` or ``"xla"``.
    """

    num_species: int
    cutoff: float
    average_neighbors: float
    energy_scale: float
    channels: int = 16
    max_degree: int = 2
    num_layers: int = 3
    num_radial: int = 8
    hidden: tuple[int, ...] = (32,)
    impl: Literal["auto", "cuda", "xla"] = "auto"

    @nn.compact
    def __call__(self, graph: Graph, num_frames: int) -> Float[Array, " frame"]:
        """Energies in eV, ``[num_frames]``, up to the constant that the caller adds."""
        num_nodes = graph.positions.shape[0]
        harmonics, radial = edge_features(graph, self.cutoff, self.max_degree, self.num_radial)
        embedding = nn.Embed(self.num_species, self.channels, param_dtype=radial.dtype)
        x = e3nn.IrrepsArray(f"{self.channels}x0e", embedding(graph.species))
        for layer in range(self.num_layers):
            last = layer == self.num_layers - 1
            degrees = range(1) if last else range(self.max_degree + 1)
            gated = e3nn.Irreps([(self.channels, (degree, (-1) ** degree)) for degree in degrees[1:]])
            irreps = e3nn.Irreps(f"{self.channels}x0e") + e3nn.Irreps(f"{gated.num_irreps}x0e") + gated
            self_connection = e3nn.flax.Linear(irreps, num_indexed_weights=self.num_species, force_irreps_out=True)(
                graph.species, x
            )
            messages = Convolution(
                filter_ir_out=[irrep for _, irrep in irreps],
                hidden=self.hidden,
                activation=nn.silu,
                scale=self.average_neighbors**-0.5,
                impl=self.impl,
            )(
                e3nn.flax.Linear(x.irreps)(x),
                harmonics,
                radial,
                jnp.asarray(graph.senders),
                jnp.asarray(graph.receivers),
                num_nodes=num_nodes,
                receivers_sorted=True,
            )
            x = e3nn.flax.Linear(irreps, force_irreps_out=True)(messages) + self_connection
            x = e3nn.gate(x, even_act=nn.silu, even_gate_act=nn.silu)  # type: ignore[arg-type]
        energies = e3nn.flax.Linear(e3nn.Irreps("0e"), force_irreps_out=True)(x).array[:, 0]
        return self.energy_scale * jax.ops.segment_sum(energies, graph.frame, num_frames)


def edge_features(
    graph: Graph, cutoff: float, max_degree: int, num_radial: int
) -> tuple[e3nn.IrrepsArray, Float[Array, "edge radial"]]:
    """Spherical harmonics and radial functions of all edges.

    The vector of an edge of zero length has no direction, and the derivative of its length is infinite. Only padding
    has such edges: they are given the length of the cutoff instead, where every radial function is zero.
    """
    positions = jnp.asarray(graph.positions)
    sender_positions = positions.at[graph.senders].get(mode="clip")
    vectors = positions.at[graph.receivers].get(mode="clip") - sender_positions
    padding = jnp.sum(vectors**2, axis=-1, keepdims=True) == 0
    vectors = jnp.where(padding, jnp.array([0.0, 0.0, cutoff], vectors.dtype), vectors)
    lengths = jnp.linalg.norm(vectors, axis=-1)
    envelope = cast(Array, e3nn.poly_envelope(5, 2, cutoff)(lengths))
    radial = e3nn.bessel(lengths, num_radial, cutoff) * envelope[:, None]
    irreps = e3nn.Irreps.spherical_harmonics(max_degree)
    harmonics = e3nn.spherical_harmonics(irreps, vectors, normalize=True, normalization="component")
    return harmonics, radial


def energies_and_forces(
    model: EnergyModel, params: dict, graph: Graph, num_frames: int
) -> tuple[Float[Array, " frame"], Float[Array, "node 3"]]:
    """Energies in eV, up to the constant, and forces ``-dE/dx`` in eV/A."""

    def total_energy(positions: Float[Array, "node 3"]) -> tuple[Float[Array, ""], Float[Array, " frame"]]:
        energies = cast(Array, model.apply(params, graph._replace(positions=positions), num_frames))
        return jnp.sum(energies), energies

    gradient, energies = jax.grad(total_energy, has_aux=True)(graph.positions)
    return energies, -gradient


def convolution_path(model: EnergyModel) -> str:
    """In words, which path the convolutions take on this machine."""
    degrees = range(model.max_degree + 1)
    irreps = e3nn.Irreps([(model.channels, (degree, (-1) ** degree)) for degree in degrees])
    harmonics = e3nn.Irreps.spherical_harmonics(model.max_degree)
    widest = jaxcg.TensorProduct.channelwise(irreps, harmonics, filter_ir_out=irreps)
    path = {"cuda": "generated CUDA kernels", "xla": "XLA"}[jaxcg.path_taken(widest, impl=model.impl)]
    return f"{path}, on {jax.devices()[0].device_kind}"
