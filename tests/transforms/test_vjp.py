"""Reverse mode: every gradient on its own, path by path, against e3nn-jax, and cotangents of every kind."""

import e3nn_jax as e3nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcg
from tests import emulator
from tests._cases import replace_instructions
from tests._oracle import SCALARS, SMALL, WIDE, Problem, assert_close, assert_nonzero

IR_MUL = jaxcg.TensorProduct.channelwise("3x0e+2x1o+1e", "0e+1o", "0e+1o+1e", layout="ir_mul")
UNWEIGHTED = replace_instructions(SMALL, tuple((*ins[:4], False, ins[5]) for ins in SMALL.instructions))
FULLY_CONNECTED = jaxcg.TensorProduct.fully_connected("3x0e+2x1o", "2x0e+1o", "2x0e+3x1o")
PROBLEMS = {
    "wide": Problem.random(WIDE),
    "ir_mul": Problem.random(IR_MUL),
    "shared-weights": Problem.random(SMALL, shared=True),
    "unweighted": Problem.random(UNWEIGHTED),
    "fully-connected": Problem.random(FULLY_CONNECTED),
    "fully-connected-shared": Problem.random(FULLY_CONNECTED, shared=True),
    "more-senders-than-receivers": Problem.random(SMALL, nodes=3, senders=7),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_convolution_equals_e3nn(problem: Problem) -> None:
    actual = jax.jit(lambda c, *v: jax.vjp(problem.convolve, *v)[1](c))(problem.cotangent(), *problem.operands)
    expected = jax.vjp(problem.convolve_by_e3nn, *problem.operands)[1](problem.cotangent())
    assert_nonzero(*actual)
    assert_close(actual, expected)


@pytest.mark.parametrize("problem", [PROBLEMS["wide"], PROBLEMS["ir_mul"]], ids=["wide", "ir_mul"])
def test_product_equals_e3nn(problem: Problem) -> None:
    problem = problem.on_rows()
    actual = jax.vjp(problem.multiply, *problem.operands)[1](problem.cotangent())
    expected = jax.vjp(problem.multiply_by_e3nn, *problem.operands)[1](problem.cotangent())
    assert_nonzero(*actual)
    assert_close(actual, expected)


def test_broadcast_operands_of_the_product() -> None:
    # Gradients of what was broadcast are sums over the rows it was broadcast to.
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((4, 1, SMALL.irreps_in1.dim)))
    y = jnp.asarray(rng.standard_normal((5, SMALL.irreps_in2.dim)))
    w = jnp.asarray(rng.standard_normal(SMALL.weight_numel))

    def loss(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(SMALL(x, y, w)))

    def by_hand(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        rows = jnp.broadcast_to(x, (4, 5, x.shape[-1])).reshape(20, -1)
        return loss(rows, jnp.tile(y, (4, 1)), jnp.tile(w, (20, 1)))

    assert SMALL(x, y, w).shape == (4, 5, SMALL.irreps_out.dim)
    actual = jax.grad(loss, argnums=(0, 1, 2))(x, y, w)
    assert [v.shape for v in actual] == [x.shape, y.shape, w.shape]
    assert_close(actual, jax.grad(by_hand, argnums=(0, 1, 2))(x, y, w))


@pytest.mark.parametrize("number", range(len(WIDE.instructions)))
def test_weight_gradient_of_each_path(number: int) -> None:
    # One norm over all paths would hide a path that is wrong: each is compared at its own scale.
    problem = PROBLEMS["wide"]
    i1, i2, i_out, *_ = WIDE.instructions[number]
    ir1, ir2, ir_out = WIDE.irreps_in1[i1].ir, WIDE.irreps_in2[i2].ir, WIDE.irreps_out[i_out].ir
    (mul, _), rows = WIDE.irreps_in1[i1], problem.senders.shape[0]
    blocks = zip(
        (problem.x[problem.senders], problem.y, problem.cotangent()[problem.receivers]),
        (WIDE.irreps_in1, WIDE.irreps_in2, WIDE.irreps_out), (i1, i2, i_out), (ir1, ir2, ir_out), strict=True,
    )  # fmt: skip
    x, y, z = (v[:, irreps.slices()[n]].reshape(rows, -1, ir.dim) for v, irreps, n, ir in blocks)
    c = np.asarray(e3nn.clebsch_gordan(ir1.l, ir2.l, ir_out.l), "float64") * np.sqrt(ir_out.dim)
    expected = jnp.einsum("ijk,bui,bvj,buk->bu", c, x, y, z)
    starts = np.cumsum([0, *(np.prod(WIDE.weight_shape(n)) for n in range(len(WIDE.instructions)))])
    (gradient,) = jax.vjp(lambda w: problem.convolve(problem.x, problem.y, w), problem.w)[1](problem.cotangent())
    actual = gradient[:, starts[number] : starts[number + 1]]
    assert actual.shape == (rows, mul)
    assert_nonzero(actual)
    assert_close(actual, expected)


def test_jit_does_not_lose_the_backward_pass() -> None:
    problem = PROBLEMS["more-senders-than-receivers"]

    def loss(*operands: jax.Array) -> jax.Array:
        return jnp.sum(problem.convolve(*operands) ** 2)

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    actual, traced = gradient(*problem.operands), jax.jit(gradient)(*problem.operands)
    assert_nonzero(*actual)
    assert_close(traced, actual)
    chosen = jax.jit(lambda flag, *v: jax.lax.cond(flag, gradient, lambda *v: v, *v))
    assert_close(chosen(True, *problem.operands), actual)
    assert_close(chosen(False, *problem.operands), problem.operands)


def test_an_irrep_that_no_path_reads_has_a_zero_gradient() -> None:
    tp = jaxcg.TensorProduct.channelwise("3x0e+2x1o+2x2e", "1o", "1o")
    problem = Problem.random(tp)
    used = {ins[0] for ins in tp.instructions}
    (unused,) = {0, 1, 2} - used
    gradient, *_ = jax.vjp(problem.convolve, *problem.operands)[1](problem.cotangent())
    part = tp.irreps_in1.slices()[unused]
    assert_nonzero(gradient)
    np.testing.assert_array_equal(gradient[:, part], 0)


@pytest.mark.parametrize("rows", [1, 2000, 3000])
def test_double_backward_of_a_sum(rows: int) -> None:
    # The cotangent of a sum is a broadcast scalar; a peer read it as a dense array.
    tp = jaxcg.TensorProduct.channelwise("3x0e", "0e+1o+2e", "0e+1o+2e")
    problem = Problem.random(tp, edges=rows).on_rows()

    def penalty(product, x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        return sum(jnp.sum(g**2) for g in jax.grad(lambda *v: product(*v).sum(), argnums=(0, 1, 2))(x, y, w))

    actual, expected = (
        jax.jit(jax.grad(lambda *v, f=f: penalty(f, *v), argnums=(0, 1, 2)))(*problem.operands)
        for f in (problem.multiply, problem.multiply_by_e3nn)
    )
    assert_nonzero(*actual)
    assert_close(actual, expected)


def test_views_of_operands_and_cotangents() -> None:
    problem = PROBLEMS["shared-weights"]
    x, y, w = problem.operands
    wide = jnp.pad(x, ((1, 2), (3, 0)))

    def through_views(function, wide: jax.Array, y: jax.Array) -> jax.Array:
        z = function(wide[1:-2, 3:], y.T[::-1].T[:, ::-1], w)
        return jnp.sum(z.T[::2] ** 2) + jnp.sum(z[::-1, 1:5])

    actual, expected = (
        jax.grad(lambda *v, f=f: through_views(f, *v), argnums=(0, 1))(wide, y)
        for f in (problem.convolve, problem.convolve_by_e3nn)
    )
    assert_nonzero(*actual)
    assert_close(actual, expected)


@pytest.mark.parametrize("problem", [Problem.random(SCALARS), Problem.random(SMALL).on_rows()], ids=["graph", "rows"])
def test_emulated_kernels(problem: Problem) -> None:
    graph = problem.num_nodes != problem.senders.shape[0]
    function, oracle = (
        (problem.convolve, problem.convolve_by_e3nn) if graph else (problem.multiply, problem.multiply_by_e3nn)
    )
    expected = jax.vjp(oracle, *problem.operands)[1](problem.cotangent())
    with emulator.emulated():
        pulled = jax.jit(lambda c, *v: jax.vjp(function, *v)[1](c))
        # The value is dead code, and all three gradients come from one call.
        assert pulled.lower(problem.cotangent(), *problem.operands).as_text().count("@jaxcg_launch") == 1
        assert_close(pulled(problem.cotangent(), *problem.operands), expected)
