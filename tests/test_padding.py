"""Padded batches: energy, forces and parameter gradients are those without padding, and nothing is compiled again."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import e3nn_jax as e3nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcg
from tests._oracle import assert_close, assert_nonzero

TP = jaxcg.TensorProduct.channelwise("3x0e+2x1o", "0e+1o", "0e+1o")


class Graph(NamedTuple):
    """A molecule, or several; the mask says which nodes are real."""

    positions: jax.Array
    features: jax.Array
    senders: jax.Array
    receivers: jax.Array
    mask: jax.Array


class Parameters(NamedTuple):
    radial: jax.Array
    readout: jax.Array


def molecule(nodes: int, seed: int = 0) -> Graph:
    """All pairs within a cutoff, shuffled."""
    rng = np.random.default_rng(seed)
    positions = rng.standard_normal((nodes, 3)) * 1.2
    distances = np.linalg.norm(positions[:, None] - positions, axis=-1)
    senders, receivers = rng.permutation(np.argwhere((distances < 2.5) & (distances > 0))).T
    features = rng.standard_normal((nodes, TP.irreps_in1.dim))
    return Graph(*map(jnp.asarray, (positions, features, senders, receivers, np.ones(nodes, bool))))


def parameters() -> Parameters:
    rng = np.random.default_rng(9)
    return Parameters(
        jnp.asarray(rng.standard_normal((4, TP.weight_numel))), jnp.asarray(rng.standard_normal(TP.irreps_out.dim))
    )


def energy(graph: Graph, p: Parameters, **options: object) -> jax.Array:
    nodes = graph.positions.shape[0]
    vectors = graph.positions.at[graph.receivers].get(mode="clip") - graph.positions.at[graph.senders].get(mode="clip")
    squared = jnp.sum(vectors**2, axis=1)
    # The root of 0 has no derivative: the usual guard of a model that meets edges of length zero.
    length = jnp.where(squared > 0, jnp.sqrt(jnp.where(squared > 0, squared, 1.0)), 0.0)
    w = jnp.exp(-((length[:, None] - jnp.arange(4.0)) ** 2)) @ p.radial
    y = e3nn.spherical_harmonics(TP.irreps_in2, vectors, normalize=False, normalization="component").array
    z = TP.convolve(graph.features, y, w, graph.senders, graph.receivers, num_nodes=nodes, **options)
    return jnp.sum(jnp.where(graph.mask, jnp.tanh(z @ p.readout), 0.0))


def everything(graph: Graph, p: Parameters) -> tuple[jax.Array, jax.Array, Parameters]:
    """Energy, forces, and the parameters' gradient of a loss on both."""

    def forces(p: Parameters) -> jax.Array:
        return -jax.grad(lambda r: energy(graph._replace(positions=r), p))(graph.positions)

    def loss(p: Parameters) -> jax.Array:
        return energy(graph, p) ** 2 + jnp.sum(jnp.where(graph.mask[:, None], jnp.sin(forces(p)), 0.0))

    return energy(graph, p), forces(p), jax.grad(loss)(p)


def pad(graph: Graph, nodes: int, edges: int, style: str) -> Graph:
    """Pad to a bucket; the padding edges as they are met in the wild."""
    real = graph.positions.shape[0]
    more_nodes, more_edges = nodes - real, edges - graph.senders.shape[0]
    assert more_nodes > 0 and more_edges > 0
    index = {"dummy-node": real, "sentinel": nodes, "far-out": 10**9, "negative": -1}[style]
    filler = 0.0 if style == "dummy-node" else jnp.nan
    width = ((0, more_nodes), (0, 0))
    return Graph(
        jnp.pad(graph.positions, width),
        jnp.pad(graph.features, width, constant_values=filler),
        jnp.pad(graph.senders, (0, more_edges), constant_values=index),
        jnp.pad(graph.receivers, (0, more_edges), constant_values=index),
        jnp.pad(graph.mask, (0, more_nodes)),
    )


STYLES = ("dummy-node", "sentinel", "far-out", "negative")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("nodes", [10, 14])
def test_padding_changes_nothing(nodes: int, style: str) -> None:
    graph, p = molecule(nodes), parameters()
    expected = jax.jit(everything)(graph, p)
    assert_nonzero(*jax.tree.leaves(expected))
    padded = pad(graph, 24, graph.senders.shape[0] + 40, style)
    found, forces, gradients = jax.jit(everything)(padded, p)
    assert all(np.isfinite(v).all() for v in jax.tree.leaves((found, forces, gradients)))
    assert_close((found, forces[:nodes], gradients), expected)
    np.testing.assert_array_equal(forces[nodes:], 0)


def test_forces_are_the_gradient_of_the_energy() -> None:
    graph, p = molecule(8), parameters()
    padded = pad(graph, 10, graph.senders.shape[0] + 5, "sentinel")
    forces = -jax.jit(jax.grad(lambda r: energy(padded._replace(positions=r), p)))(padded.positions)
    at = jax.jit(lambda r: energy(padded._replace(positions=r), p))
    step = 1e-5
    for node, axis in ((0, 0), (3, 1), (7, 2)):
        moved = [at(padded.positions.at[node, axis].add(sign * step)) for sign in (1, -1)]
        difference = (moved[1] - moved[0]) / (2 * step)
        # The third derivative times step**2, and rounding over step.
        np.testing.assert_allclose(forces[node, axis], difference, rtol=1e-7, atol=1e-8)


def test_two_molecules_in_one_batch() -> None:
    first, second, p = molecule(6), molecule(9, seed=1), parameters()
    batch = Graph(*(jnp.concatenate([a, b]) for a, b in zip(first, second, strict=True)))
    shift = jnp.repeat(jnp.array([0, 6]), jnp.array([first.senders.size, second.senders.size]))
    batch = batch._replace(senders=batch.senders + shift, receivers=batch.receivers + shift)
    forces = jax.jit(lambda g: jax.grad(lambda r: energy(g._replace(positions=r), p))(g.positions))
    padded = pad(batch, 20, batch.senders.size + 30, "sentinel")
    assert_close(forces(padded)[:15], jnp.concatenate([forces(first), forces(second)]))


@pytest.mark.parametrize("prepare", ["nothing", "order"])
def test_growth_inside_a_bucket_compiles_nothing(prepare: str) -> None:
    p = parameters()
    run: Callable = jax.jit(lambda graph, p: everything(graph, p))
    if prepare == "order":

        @jax.jit
        def run(graph: Graph, p: Parameters) -> jax.Array:
            order = jaxcg.sort_edges(graph.senders, graph.receivers, graph.positions.shape[0])
            return jax.grad(lambda r: energy(graph._replace(positions=r), p, edge_order=order))(graph.positions)

    for nodes, style in ((8, "sentinel"), (9, "negative"), (10, "dummy-node"), (12, "sentinel")):
        graph = molecule(nodes, seed=nodes)
        assert graph.senders.size < 150
        run(pad(graph, 16, 150, style), p)
    assert run._cache_size() == 1


def test_an_equal_product_compiles_nothing() -> None:
    # A model that makes its products anew in every call, as flax modules do, must not trace or compile again.
    graph, index = molecule(8), jnp.zeros(5, jnp.int32)
    traces = []

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        traces.append(x)
        tp = jaxcg.TensorProduct.channelwise("3x0e+2x1o", "0e+1o", "0e+1o")
        return tp.convolve(x, jnp.ones((5, 4)), jnp.ones((5, tp.weight_numel)), index, index, num_nodes=8)

    for _ in range(3):
        run(graph.features)
    assert len(traces) == 1

    @partial(jax.jit, static_argnums=1)
    def of(x: jax.Array, tp: jaxcg.TensorProduct) -> jax.Array:
        return tp.convolve(x, jnp.ones((5, 4)), jnp.ones((5, tp.weight_numel)), index, index, num_nodes=8)

    for layout in ("mul_ir", "ir_mul", "mul_ir"):
        of(graph.features, jaxcg.TensorProduct.channelwise("3x0e+2x1o", "0e+1o", "0e+1o", layout=layout))
    assert of._cache_size() == 2
