"""Third and fourth derivatives: training on Hessians, and finite differences of every composition of modes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.test_util import check_grads

from tests._oracle import SCALARS, SMALL, WIDE, Problem, assert_close, assert_nonzero


@pytest.mark.parametrize("graph", [True, False], ids=["convolve", "product"])
def test_check_grads_to_third_order_in_both_modes(graph: bool) -> None:
    problem = Problem.random(WIDE)
    problem = problem if graph else problem.on_rows()
    check_grads(problem.convolve if graph else problem.multiply, problem.operands, order=3, modes=["fwd", "rev"])


def test_check_grads_with_shared_weights() -> None:
    problem = Problem.random(SCALARS, shared=True)
    check_grads(problem.convolve, problem.operands, order=2, modes=["fwd", "rev"])


def test_gradient_of_a_loss_of_hessian_columns() -> None:
    # Training on phonons: the parameters' gradient of a loss of a derivative of forces.
    problem = Problem.random(SMALL)
    x, y, w = problem.operands
    direction, *_ = problem.tangents()

    def loss(convolve: Callable, w: jax.Array) -> jax.Array:
        def energy(x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.tanh(convolve(x, y, w)))

        return jnp.sum(jax.jvp(jax.grad(energy), (x,), (direction,))[1] ** 2)

    actual, expected = (
        jax.jit(jax.grad(lambda w, f=f: loss(f, w)))(w) for f in (problem.convolve, problem.convolve_by_e3nn)
    )
    assert_nonzero(actual)
    assert_close(actual, expected)


def test_the_pure_third_derivative_of_the_product() -> None:
    # The product is linear in x, y and w: its third derivative along all three is itself, six times over.
    problem = Problem.random(SMALL)
    tangents = problem.tangents()

    def along(t: jax.Array) -> jax.Array:
        return problem.convolve(*(v + t * tv for v, tv in zip(problem.operands, tangents, strict=True)))

    third = jax.jit(jax.jacfwd(jax.jacfwd(jax.jacfwd(along))))(0.0)
    assert_nonzero(third)
    assert_close(third, 6 * problem.convolve(*tangents))


def test_fourth_derivatives() -> None:
    problem = Problem.random(SCALARS, nodes=3, edges=4)
    direction, *_ = problem.tangents()

    def fourth(convolve: Callable, x: jax.Array) -> jax.Array:
        def energy(x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(convolve(x, problem.y, problem.w)))

        def curvature(x: jax.Array) -> jax.Array:
            slope = lambda x: jax.jvp(energy, (x,), (direction,))[1]  # noqa: E731
            return jax.jvp(slope, (x,), (direction,))[1]

        return jax.grad(lambda x: jnp.sum(jax.grad(curvature)(x) ** 2))(x)

    actual, expected = (
        jax.jit(lambda x, f=f: fourth(f, x))(problem.x) for f in (problem.convolve, problem.convolve_by_e3nn)
    )
    assert_nonzero(actual)
    assert_close(actual, expected)
