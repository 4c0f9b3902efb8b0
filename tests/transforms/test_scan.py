"""Control flow: layers, optimiser steps and dynamics in loops, with gradients through and inside them."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jaxcg
from tests import emulator
from tests._oracle import Problem, assert_close, assert_nonzero

# The result has as many elements as x, so that layers follow each other.
VECTORS = jaxcg.TensorProduct.channelwise("2x0e+2x1o", "1o", "0e+1o")
PROBLEM = Problem.random(VECTORS)


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return x + 0.1 * jnp.tanh(PROBLEM.convolve(x, PROBLEM.y, w))


def weights(count: int) -> jax.Array:
    return jnp.stack([PROBLEM.tangents(seed)[2] for seed in range(count)])


def scanned(x: jax.Array, w: jax.Array, wrap=lambda f: f) -> jax.Array:
    return jnp.sum(jax.lax.scan(lambda x, w: (wrap(layer)(x, w), None), x, w)[0] ** 2)


def unrolled(x: jax.Array, w: jax.Array) -> jax.Array:
    for one in w:
        x = layer(x, one)
    return jnp.sum(x**2)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_gradient_through_layers_in_a_scan(wrap) -> None:
    w = weights(3)
    expected = jax.jit(jax.value_and_grad(unrolled, argnums=(0, 1)))(PROBLEM.x, w)
    actual = jax.jit(jax.value_and_grad(partial(scanned, wrap=wrap), argnums=(0, 1)))(PROBLEM.x, w)
    assert_nonzero(*jax.tree.leaves(expected))
    assert_close(actual, expected)


def test_second_derivative_through_a_scan() -> None:
    w = weights(2)
    tangent, *_ = PROBLEM.tangents()

    def of(loss, x: jax.Array) -> jax.Array:
        return jax.jvp(jax.grad(lambda x: loss(x, w)), (x,), (tangent,))[1]

    actual, expected = (jax.jit(partial(of, loss))(PROBLEM.x) for loss in (scanned, unrolled))
    assert_nonzero(expected)
    assert_close(actual, expected)


def test_force_training_step_eager_jitted_donated_and_scanned() -> None:
    target = PROBLEM.cotangent()[:, : PROBLEM.x.shape[1]]

    def loss(w: jax.Array) -> jax.Array:
        forces = jax.grad(lambda x: jnp.sum(layer(x, w) ** 2))(PROBLEM.x)
        return jnp.mean((forces - target) ** 2)

    def step(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.5 * gradient, value

    def run(one) -> list[float]:
        w, losses = PROBLEM.w + 0, []
        for _ in range(4):
            w, value = one(w)
            losses.append(float(value))
        return losses

    expected = jnp.asarray(run(step))
    assert expected[-1] < expected[0]
    # XLA on a CPU may decline a donation, but must not change the values.
    curves = [jnp.asarray(run(jax.jit(step))), jnp.asarray(run(jax.jit(step, donate_argnums=0)))]
    curves.append(jax.jit(lambda w: jax.lax.scan(lambda w, _: step(w), w, length=4))(PROBLEM.w)[1])
    for curve in curves:
        assert_close(curve, expected, summands=1000)


def test_while_loop_cond_and_fori_loop() -> None:
    w = PROBLEM.w

    def to_the_third(x: jax.Array) -> jax.Array:
        body = lambda state: (state[0] + 1, layer(state[1], w))  # noqa: E731
        return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]

    expected = layer(layer(layer(PROBLEM.x, w), w), w)
    assert_close(jax.jit(to_the_third)(PROBLEM.x), expected)
    assert_close(jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: layer(x, w), x))(PROBLEM.x), expected)

    def maybe(x: jax.Array, flag: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.cond(flag, lambda x: layer(x, w), lambda x: x, x) ** 2)

    gradient = jax.jit(jax.grad(maybe))
    assert_close(gradient(PROBLEM.x, True), jax.grad(lambda x: jnp.sum(layer(x, w) ** 2))(PROBLEM.x))
    assert_close(gradient(PROBLEM.x, False), 2 * PROBLEM.x)


def test_gradient_of_scanned_batches() -> None:
    w = weights(2)
    batch = jnp.stack([PROBLEM.x, PROBLEM.tangents()[0]])
    actual = jax.jit(jax.vmap(jax.grad(scanned), in_axes=(0, None)))(batch, w)
    assert_close(actual, jnp.stack([jax.grad(unrolled)(x, w) for x in batch]))


def test_emulated_kernels() -> None:
    w = weights(3)
    expected = jax.jit(jax.grad(unrolled, argnums=(0, 1)))(PROBLEM.x, w)
    with emulator.emulated():
        assert_close(jax.jit(jax.grad(scanned, argnums=(0, 1)))(PROBLEM.x, w), expected)
