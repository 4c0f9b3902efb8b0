"""Rematerialisation: the same values and derivatives, and the product computed again rather than kept."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from tests import emulator
from tests._oracle import SCALARS, SMALL, Problem, assert_close, assert_nonzero, equations

POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
}


def loss_of(problem: Problem, wrap: Callable) -> Callable[..., jax.Array]:
    """Two layers, the messages of each under `wrap`."""

    @wrap
    def layer(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        z = problem.convolve(x, y, w)
        return jnp.tanh(z[:, : x.shape[1]]) + jnp.sum(z**2)

    def loss(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(layer(layer(x, y, w), y, w) ** 2)

    return loss


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_gradients_are_unchanged(policy: Callable) -> None:
    problem = Problem.random(SMALL)
    plain = jax.jit(jax.grad(loss_of(problem, lambda f: f), argnums=(0, 1, 2)))(*problem.operands)
    remat = loss_of(problem, partial(jax.checkpoint, policy=policy))
    assert_nonzero(*plain)
    assert_close(jax.jit(jax.grad(remat, argnums=(0, 1, 2)))(*problem.operands), plain)


def test_second_derivatives_are_unchanged() -> None:
    problem = Problem.random(SMALL)
    x, y, w = problem.operands

    def penalty(loss: Callable, w: jax.Array) -> jax.Array:
        return jnp.sum(jax.grad(loss)(x, y, w) ** 2)

    plain, remat = (
        jax.jit(jax.grad(lambda w, f=f: penalty(loss_of(problem, f), w)))(w) for f in (lambda f: f, jax.checkpoint)
    )
    assert_nonzero(plain)
    assert_close(remat, plain)


def test_the_forward_pass_runs_again_only_where_it_is_asked_to() -> None:
    problem = Problem.random(SMALL)

    def products(wrap: Callable) -> int:
        jaxpr = jax.make_jaxpr(jax.grad(loss_of(problem, wrap), argnums=2))(*problem.operands)
        return len(equations(jaxpr.jaxpr))

    # Two layers forward, two backward; and with remat the two forward again.
    assert products(lambda f: f) == 4
    assert products(jax.checkpoint) == 6


def test_emulated_kernels() -> None:
    problem = Problem.random(SCALARS)

    def loss(wrap: Callable, w: jax.Array) -> jax.Array:
        layer = wrap(lambda w: jnp.tanh(problem.convolve(problem.x, problem.y, w)))
        return jnp.sum(layer(w) ** 2)

    expected = jax.grad(lambda w: loss(lambda f: f, w))(problem.w)
    with emulator.emulated():
        assert_close(jax.jit(jax.grad(lambda w: loss(jax.checkpoint, w)))(problem.w), expected)
