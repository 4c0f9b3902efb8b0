"""Batching: every combination of batched arguments, nested, of derivatives, empty batches."""

import itertools
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcg
from tests import emulator
from tests._oracle import SCALARS, SMALL, WIDE, Problem, assert_close, assert_nonzero

NAMES = ("x", "y", "w", "senders", "receivers")
COMBINATIONS = [axes for axes in itertools.product([None, 0], repeat=5) if any(a is not None for a in axes)]
# One argument, all but one, and all; the others of most products and sizes with --slow.
FEW = [axes for axes in COMBINATIONS if sum(a is not None for a in axes) in (1, 4, 5)]
REST = [axes for axes in COMBINATIONS if axes not in FEW]


# Shared weights of a channelwise product are factored out of the sum over edges; others stay inside, and a batch of
# them takes a loop.
FULLY_CONNECTED = jaxcg.TensorProduct.fully_connected("2x0e", "0e+1o", "0e+2x1o")
BATCHES = {
    "weights-of-edges": (SCALARS, False, 3),
    "shared-weights": (SCALARS, True, 3),
    "fully-connected": (FULLY_CONNECTED, True, 3),
    "one-entry": (SCALARS, False, 1),
    "no-entry": (SCALARS, False, 0),
    "no-entry-shared-weights": (SCALARS, True, 0),
    "no-entry-fully-connected": (FULLY_CONNECTED, True, 0),
}


def stacked(tp: jaxcg.TensorProduct, shared: bool, size: int) -> list[tuple[jax.Array, ...]]:
    """Arguments (x, y, w, senders, receivers) for each batch entry, all different; some edges absent."""
    problems = [Problem.random(tp, senders=7, shared=shared, seed=seed) for seed in range(size)]
    entries = [(*p.operands, p.senders, p.receivers) for p in problems]
    return [(x, y, w, s.at[3 + n].set(-1), r.at[5].set(5 + n)) for n, (x, y, w, s, r) in enumerate(entries)]


def value_and_gradients(tp: jaxcg.TensorProduct, *arguments: jax.Array) -> tuple[jax.Array, ...]:
    """The value and all three gradients of a convolution, for a fixed cotangent."""
    *operands, senders, receivers = arguments
    z, pull = jax.vjp(lambda *v: tp.convolve(*v, senders, receivers, num_nodes=5), *operands)
    return z, *pull(jnp.cos(jnp.arange(z.size, dtype=z.dtype)).reshape(z.shape))


def every_batch() -> Iterator[object]:
    for name, batch in BATCHES.items():
        slow = [] if name == "weights-of-edges" else [pytest.mark.slow]
        yield pytest.param(*batch, FEW, id=name)
        yield pytest.param(*batch, REST, id=f"{name}-rest", marks=slow)


@pytest.mark.parametrize("tp, shared, size, combinations", every_batch())
def test_every_combination_of_batched_arguments(
    tp: jaxcg.TensorProduct, shared: bool, size: int, combinations: list[tuple[int | None, ...]]
) -> None:
    entries = stacked(tp, shared, max(size, 1))
    one = jax.jit(partial(value_and_gradients, tp))
    for axes in combinations:
        arrays = [
            entries[0][n] if axis is None else jnp.stack([entry[n] for entry in entries]) for n, axis in enumerate(axes)
        ]
        arrays = [v if axis is None else v[:size] for v, axis in zip(arrays, axes, strict=True)]
        actual = jax.vmap(partial(value_and_gradients, tp), in_axes=axes)(*arrays)
        if size == 0:
            assert [v.shape for v in actual] == [(0, 5, tp.irreps_out.dim), *((0, *v.shape) for v in entries[0][:3])]
            continue
        rows = [one(*(v if axis is None else v[b] for v, axis in zip(arrays, axes, strict=True))) for b in range(size)]
        expected = jax.tree.map(lambda *v: jnp.stack(v), *rows)
        assert_close(actual, expected, what=f"batched {[n for n, a in zip(NAMES, axes, strict=True) if a == 0]}")


def test_other_axes_than_the_first() -> None:
    problems = [Problem.random(SMALL, seed=seed) for seed in range(3)]
    x, y, w = (jnp.stack(parts) for parts in zip(*(p.operands for p in problems), strict=True))
    senders, receivers = problems[0].senders, problems[0].receivers

    def function(*operands: jax.Array) -> jax.Array:
        return SMALL.convolve(*operands, senders, receivers, num_nodes=5)

    moved = jnp.moveaxis(x, 0, 1), jnp.moveaxis(y, 0, 2), jnp.moveaxis(w, 0, -1)
    actual = jax.vmap(function, in_axes=(1, 2, -1), out_axes=1)(*moved)
    assert_close(actual, jnp.stack([function(*v) for v in zip(x, y, w, strict=True)], axis=1))


def test_sorted_edges_and_edge_orders() -> None:
    problems = [Problem.random(SMALL, seed=seed) for seed in range(3)]
    arguments = [jnp.stack(parts) for parts in zip(*((*p.operands, p.receivers) for p in problems), strict=True)]
    senders = problems[0].senders

    def by_order(x: jax.Array, y: jax.Array, w: jax.Array, receivers: jax.Array) -> jax.Array:
        order = jaxcg.sort_edges(senders, receivers, 5)
        return SMALL.convolve(x, y, w, senders, receivers, num_nodes=5, edge_order=order)

    def by_sorting(x: jax.Array, y: jax.Array, w: jax.Array, receivers: jax.Array) -> jax.Array:
        by = jnp.argsort(receivers)
        return SMALL.convolve(x, y[by], w[by], senders[by], receivers[by], num_nodes=5, receivers_sorted=True)

    expected = jnp.stack([by_order(*(v[b] for v in arguments)) for b in range(3)])
    assert_close(jax.vmap(by_order)(*arguments), expected)
    assert_close(jax.vmap(by_sorting)(*arguments), expected)


@pytest.mark.parametrize("graph", [True, False], ids=["convolve", "product"])
def test_jit_of_vmap_of_gradients(graph: bool) -> None:
    problems = [Problem.random(WIDE, seed=seed) for seed in range(2)]
    problems = problems if graph else [p.on_rows() for p in problems]
    batches = [jnp.stack(parts) for parts in zip(*(p.operands for p in problems), strict=True)]
    first = problems[0]

    def loss(*operands: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(first.convolve(*operands) if graph else first.multiply(*operands)))

    def loss_by_e3nn(*operands: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(first.convolve_by_e3nn(*operands) if graph else first.multiply_by_e3nn(*operands)))

    actual = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2))))(*batches)
    expected = [jax.jit(jax.grad(loss_by_e3nn, argnums=(0, 1, 2)))(*(v[b] for v in batches)) for b in range(2)]
    assert_nonzero(*actual)
    assert_close(actual, jax.tree.map(lambda *v: jnp.stack(v), *expected))


def test_gradient_of_vmap_and_vmap_of_vmap() -> None:
    problem = Problem.random(SMALL)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 3, *problem.x.shape)))
    y = jnp.asarray(rng.standard_normal((3, *problem.y.shape)))
    w = problem.w

    def nested(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        return jax.vmap(jax.vmap(problem.convolve, in_axes=(0, 0, None)), in_axes=(0, None, None))(x, y, w)

    def loop(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.stack([jnp.stack([problem.convolve(x[a, b], y[b], w) for b in range(3)]) for a in range(2)])

    assert_close(nested(x, y, w), loop(x, y, w))
    actual, expected = (
        jax.jit(jax.grad(lambda *v, f=f: jnp.sum(f(*v) ** 2), argnums=(0, 1, 2)))(x, y, w) for f in (nested, loop)
    )
    assert_nonzero(*actual)
    assert_close(actual, expected)


def test_rows_of_the_product_are_a_batch() -> None:
    problem = Problem.random(SMALL).on_rows()
    by_row = jax.vmap(problem.multiply)(*problem.operands)
    np.testing.assert_array_equal(by_row, problem.multiply(*problem.operands))


def test_emulated_gradients_of_a_batch() -> None:
    problems = [Problem.random(SCALARS, seed=seed) for seed in range(2)]
    x, y, w, senders = (jnp.stack(v) for v in zip(*((*p.operands, p.senders) for p in problems), strict=True))
    receivers = problems[0].receivers

    def loss(x: jax.Array, y: jax.Array, w: jax.Array, senders: jax.Array) -> jax.Array:
        return jnp.sum(SCALARS.convolve(x, y, w, senders, receivers, num_nodes=5) ** 2)

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    expected = [gradient(*(v[b] for v in (x, y, w, senders))) for b in range(2)]
    with emulator.emulated():
        batched = jax.jit(jax.vmap(gradient))
        # The batch goes to the rows of the same two calls: no loop, no call for each entry.
        assert batched.lower(x, y, w, senders).as_text().count("@jaxcg_launch") == 2
        actual = batched(x, y, w, senders)
    assert_close(actual, jax.tree.map(lambda *v: jnp.stack(v), *expected))
