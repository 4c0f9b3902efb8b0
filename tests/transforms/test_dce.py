"""Dead code: a gradient that nobody asks for is not computed, at any order, also under remat and scan."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcg import _primitive, _terms
from jaxcg._jax_internals import dce
from tests import emulator
from tests._oracle import SMALL, Problem, assert_close, equations

PROBLEM = Problem.random(SMALL)
WRAPS = {"plain": lambda f: f, "checkpoint": jax.checkpoint, "jit": jax.jit}
ASKED = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)]


def loss(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(PROBLEM.convolve(x, y, w)))


def calls(function: Callable, *arguments: Any) -> list[str]:
    """The slots of the results of every call of the primitive in a program without its dead code, as ``"xy"``."""
    jaxpr = dce(jax.make_jaxpr(function)(*arguments).jaxpr)
    return ["".join(out.slot for out in equation.params["terms"].outputs) for equation in equations(jaxpr)]


def some_gradients(asked: Sequence[int], wrap: Callable) -> Callable:
    """All gradients, of which some are returned."""

    def function(*operands: jax.Array) -> list[jax.Array]:
        gradients = jax.grad(wrap(loss), argnums=(0, 1, 2))(*operands)
        return [gradients[n] for n in asked]

    return function


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_gradients_that_nobody_asks_for(asked: Sequence[int], wrap: Callable) -> None:
    wanted = "".join("xyw"[n] for n in asked)
    # The value is needed (by the derivative of tanh): one call forward (again under remat, where the first is dead).
    assert calls(some_gradients(asked, wrap), *PROBLEM.operands) == ["z", wanted]


@pytest.mark.parametrize("argnum", range(3))
def test_differentiation_by_one_operand_makes_one_term(argnum: int) -> None:
    jaxpr = dce(jax.make_jaxpr(jax.grad(loss, argnums=argnum))(*PROBLEM.operands).jaxpr)
    *_, backward = equations(jaxpr)
    (out,) = backward.params["terms"].outputs
    assert len(out.terms) == 1 and len(backward.params["terms"].operands) == 3


def test_the_operand_of_a_dead_gradient_is_not_kept() -> None:
    # Only the gradients of x and y read w: what computes w is dead once they are.
    def only_weights(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        return jax.vjp(PROBLEM.convolve, x, y, jnp.sin(w))[1](PROBLEM.cotangent())[2]

    jaxpr = dce(jax.make_jaxpr(only_weights)(*PROBLEM.operands).jaxpr)
    assert not [equation for equation in jaxpr.eqns if equation.primitive.name == "sin"]
    assert calls(only_weights, *PROBLEM.operands) == ["w"]


def test_force_training_needs_no_gradient_of_the_graph_by_the_weights() -> None:
    # d/dw of a penalty on forces (-dE/dy): forward, its y gradient, then the double backward by w alone.
    def penalty(w: jax.Array) -> jax.Array:
        return jnp.sum(jax.grad(loss, argnums=1)(PROBLEM.x, PROBLEM.y, w) ** 2)

    found = calls(jax.grad(penalty), PROBLEM.w)
    assert "x" not in "".join(found)
    assert found.count("z") <= 2 and all(len(slots) <= 2 for slots in found)


def test_inside_a_scan() -> None:
    def total(x: jax.Array) -> jax.Array:
        def body(sums: tuple[jax.Array, ...], step: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
            gradients = jax.grad(loss, argnums=(0, 1, 2))(x + step, PROBLEM.y, PROBLEM.w)
            return tuple(s + g for s, g in zip(sums, gradients, strict=True)), None

        zeros = tuple(jnp.zeros_like(v) for v in PROBLEM.operands)
        return jax.lax.scan(body, zeros, jnp.arange(3.0))[0][1]

    assert calls(total, PROBLEM.x) == ["z", "y"]


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_no_kernel_writes_what_nobody_asks_for(wrap: Callable) -> None:
    # The lowered program, kernels never built: the gradient of y alone has no result of the size of the weights.
    edges, numel = PROBLEM.w.shape
    with emulator.emulated(lambda source: b"never built"):
        text = jax.jit(some_gradients((1,), wrap)).lower(*PROBLEM.operands).as_text()
        whole = jax.jit(some_gradients((1, 2), wrap)).lower(*PROBLEM.operands).as_text()
    results = [re.findall(r"tensor<([\dx]+)xf64>", line.rpartition("->")[2]) for line in launches(text)]
    assert len(results) == 2
    assert edges * numel not in [int(np.prod(list(map(int, r.split("x"))))) for line in results for r in line]
    assert len(launches(whole)) == 2 and f"tensor<{edges}x{numel}xf64>" in launches(whole)[1].rpartition("->")[2]


def launches(text: str) -> list[str]:
    return [line for line in text.splitlines() if "@jaxcg_launch" in line]


def test_values_after_elimination() -> None:
    operands = PROBLEM.operands
    whole = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*operands)
    for asked in ASKED:
        (*part,) = jax.jit(some_gradients(asked, jax.checkpoint))(*operands)
        assert_close(part, [whole[n] for n in asked])


def test_the_rule_drops_outputs_and_then_operands() -> None:
    backward = _terms.transpose(_terms.jvp(_terms.forward(True), [True] * 3), [False] * 3 + [True] * 3, [True])
    backward = _terms.prune(backward, [True] * 3)[0]
    jaxpr = jax.make_jaxpr(lambda *v: jax.vjp(PROBLEM.convolve, *v)[1](PROBLEM.cotangent()))(*PROBLEM.operands).jaxpr
    *_, equation = equations(dce(jaxpr))
    assert equation.params["terms"] == backward
    used, smaller = _primitive._eliminate([False, False, True], equation)
    # Indices stay; of the operands x, y, w, cotangent the weights go.
    indices = equation.params["call"].num_indices
    assert used == [True] * indices + [True, True, False, True]
    assert [v.aval.shape for v in smaller.outvars] == [PROBLEM.w.shape]
    assert _primitive._eliminate([False] * 3, equation) == ([False] * (indices + 4), None)
