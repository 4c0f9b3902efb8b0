"""Forward mode: values against e3nn-jax, as the final answer under jit, and operands that do not move."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.dtypes import float0

from tests import emulator
from tests._oracle import SCALARS, SMALL, WIDE, Problem, assert_close, assert_nonzero

PROBLEMS = {
    "wide": Problem.random(WIDE),
    "shared-weights": Problem.random(SMALL, shared=True),
    "more-senders-than-receivers": Problem.random(SMALL, nodes=3, senders=7),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_convolution_equals_e3nn(problem: Problem) -> None:
    operands, tangents = problem.operands, problem.tangents()
    actual = jax.jit(lambda *v: jax.jvp(problem.convolve, v[:3], v[3:]))(*operands, *tangents)
    expected = jax.jvp(problem.convolve_by_e3nn, operands, tangents)
    assert_nonzero(*actual)
    assert_close(actual, expected)


def test_product_equals_e3nn() -> None:
    problem = Problem.random(WIDE).on_rows()
    operands, tangents = problem.operands, problem.tangents()
    actual = jax.jvp(problem.multiply, operands, tangents)
    assert_close(actual, jax.jvp(problem.multiply_by_e3nn, operands, tangents))


@pytest.mark.parametrize("moving", [m for m in itertools.product([False, True], repeat=3) if any(m)], ids=str)
def test_operands_that_do_not_move(moving: tuple[bool, ...]) -> None:
    problem = Problem.random(SMALL)
    given = [v for v, moves in zip(problem.operands, moving, strict=True) if moves]
    tangents = [t for t, moves in zip(problem.tangents(), moving, strict=True) if moves]

    def of_moving(function):
        def call(*values):
            moved = iter(values)
            return function(*(next(moved) if m else v for v, m in zip(problem.operands, moving, strict=True)))

        return call

    actual = jax.jvp(of_moving(problem.convolve), given, tangents)
    assert_close(actual, jax.jvp(of_moving(problem.convolve_by_e3nn), given, tangents))
    if sum(moving) == 1:
        # The product is linear in each operand: its derivative is itself at the tangent.
        assert_close(actual[1], of_moving(problem.convolve)(*tangents))


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: jax.jit(jax.vmap(f))], ids=["jit", "jit-vmap"])
def test_hessian_column_is_the_final_answer(wrap) -> None:
    # A peer had no lowering for a derivative that no outer gradient consumes.
    problem = Problem.random(SMALL)

    def energy(x: jax.Array) -> jax.Array:
        return jnp.sum(problem.convolve(x, *problem.operands[1:]) ** 2)

    def energy_by_e3nn(x: jax.Array) -> jax.Array:
        return jnp.sum(problem.convolve_by_e3nn(x, *problem.operands[1:]) ** 2)

    x, (tx, *_) = problem.x, problem.tangents()
    if wrap is not jax.jit:
        x, tx = jnp.stack([x, tx]), jnp.stack([tx, x])
    column = wrap(lambda x, t: jax.jvp(jax.grad(energy), (x,), (t,))[1])(x, tx)
    assert_nonzero(column)
    assert_close(column, wrap(lambda x, t: jax.jvp(jax.grad(energy_by_e3nn), (x,), (t,))[1])(x, tx))


def test_indices_are_arguments_with_no_tangent() -> None:
    problem = Problem.random(SMALL)

    def of_x_and_graph(x: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        return SMALL.convolve(x, problem.y, problem.w, senders, receivers, num_nodes=problem.num_nodes)

    none = np.zeros(problem.senders.shape, float0)
    tx, *_ = problem.tangents()
    value, tangent = jax.jvp(of_x_and_graph, (problem.x, problem.senders, problem.receivers), (tx, none, none))
    assert_close(value, problem.convolve(*problem.operands))
    assert_close(tangent, problem.convolve(tx, problem.y, problem.w))


def test_jacobian_equals_the_reverse_mode_one() -> None:
    problem = Problem.random(SCALARS, nodes=3, edges=4)
    forward = jax.jit(jax.jacfwd(problem.convolve, argnums=(0, 1, 2)))(*problem.operands)
    assert_nonzero(*forward)
    assert_close(forward, jax.jit(jax.jacrev(problem.convolve, argnums=(0, 1, 2)))(*problem.operands))


def test_linearize_makes_one_linear_function() -> None:
    problem = Problem.random(SMALL)
    value, push = jax.linearize(problem.convolve, *problem.operands)
    assert_close(value, problem.convolve(*problem.operands))
    for seed in (1, 2):
        tangents = problem.tangents(seed)
        assert_close(push(*tangents), jax.jvp(problem.convolve, problem.operands, tangents)[1])


def test_emulated_kernels() -> None:
    problem = Problem.random(SCALARS)
    operands, tangents = problem.operands, problem.tangents()
    expected = jax.jvp(problem.convolve_by_e3nn, operands, tangents)
    with emulator.emulated():
        pushed = jax.jit(lambda *v: jax.jvp(problem.convolve, v[:3], v[3:]))
        assert pushed.lower(*operands, *tangents).as_text().count("@jaxcg_launch") == 2
        assert_close(pushed(*operands, *tangents), expected)
