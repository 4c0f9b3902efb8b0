"""Transformations with ``impl="cuda"``: both multiplicities odd, both parities, unsorted edges."""

from collections.abc import Callable
from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxcg
from jaxcg.runtime import ffi

pytestmark = pytest.mark.gpu
TP = jaxcg.TensorProduct.channelwise("33x0e+5x1o+5x1e", "0e+1o", "0e+1o+1e")
NODES, EDGES = 7, 20


def graph() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(2)
    senders, receivers = rng.integers(-1, NODES + 1, EDGES), rng.integers(0, NODES, EDGES)
    return jnp.asarray(senders), jnp.asarray(receivers)


def operands(indexed: bool, dtype: str = "float64", seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = [(NODES if indexed else EDGES, TP.irreps_in1.dim), (EDGES, TP.irreps_in2.dim), (EDGES, TP.weight_numel)]
    x, y, w = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return x, y, w


def operation(indexed: bool, impl: str = "cuda") -> Callable[..., jax.Array]:
    """The convolution, or the product row by row."""
    if not indexed:
        return partial(TP, impl=impl)
    senders, receivers = graph()
    return lambda x, y, w: TP.convolve(x, y, w, senders, receivers, num_nodes=NODES, impl=impl)


def energy(indexed: bool, impl: str = "cuda") -> Callable[..., jax.Array]:
    """A function of all operands whose derivatives of every order are not zero."""

    def value(*given: jax.Array) -> jax.Array:
        z = operation(indexed, impl)(*given)
        return jnp.sum(jnp.sin(z) * z)

    return value


def assert_close(got: object, want: object, factor: float = 1e3) -> None:
    """Leaf by leaf, to `factor` roundings of the largest element."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = np.abs(np.asarray(b)).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=factor * np.finfo(a.dtype).eps * scale)


each_operation = pytest.mark.parametrize("indexed", [True, False], ids=["convolve", "product"])


@each_operation
def test_check_grads_to_order_three(indexed: bool) -> None:
    check_grads(
        jax.jit(energy(indexed)), operands(indexed), order=3, modes=("fwd", "rev"), rtol=1e-4, atol=1e-4, eps=1e-4
    )


@each_operation
def test_hessian_of_an_energy(indexed: bool) -> None:
    x, y, w = operands(indexed)
    hessian = lambda impl: jax.jit(jax.hessian(lambda y: energy(indexed, impl)(x, y, w)))(y)  # noqa: E731
    found = hessian("cuda")
    assert_close(found, hessian("xla"))
    flat = found.reshape(y.size, y.size)
    assert_close(flat, flat.T)
    assert jnp.any(flat != 0)


@each_operation
def test_jit_of_vmap_of_grad(indexed: bool) -> None:
    batch = [jnp.stack(arrays) for arrays in zip(*(operands(indexed, seed=seed) for seed in range(3)), strict=True)]
    function = jax.jit(jax.vmap(jax.grad(energy(indexed), (0, 1, 2))))
    assert function.lower(*batch).as_text().count("custom_call @jaxcg_launch") == 2
    for _ in range(4):
        results = function(*batch)
    for n in range(3):
        want = jax.grad(energy(indexed, "xla"), (0, 1, 2))(*(array[n] for array in batch))
        assert_close([result[n] for result in results], want)


@each_operation
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_alone(indexed: bool, dtype: str) -> None:
    """One gradient asked for: the same values as when all are."""
    given = operands(indexed, dtype)
    all_three = jax.grad(energy(indexed, "xla"), (0, 1, 2))(*(array.astype("float64") for array in given))
    for n in range(3):
        alone = jax.jit(jax.grad(energy(indexed), n))(*given)
        assert alone.dtype == dtype
        assert_close(alone, all_three[n])


@pytest.mark.parametrize("loop", ["scan", "while_loop", "fori_loop"])
def test_bodies_of_loops(loop: str) -> None:
    """Captured and replayed as CUDA graphs, also with results of earlier iterations kept."""
    x, y, w = operands(True)

    def step(impl: str, x: jax.Array) -> jax.Array:
        return x - 0.01 * jax.grad(energy(True, impl))(x, y, w)

    def run(impl: str) -> Callable[[jax.Array], jax.Array]:
        if loop == "scan":
            return jax.jit(lambda x: jax.lax.scan(lambda x, _: (step(impl, x), x), x, None, length=8)[1])
        if loop == "while_loop":
            body = lambda state: (state[0] + 1, step(impl, state[1]))  # noqa: E731
            return jax.jit(lambda x: jax.lax.while_loop(lambda state: state[0] < 8, body, (0, x))[1])
        return jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, x: step(impl, x), x))

    kernels = run("cuda")
    kept = [kernels(x) for _ in range(5)]
    want = run("xla")(x)
    for result in kept:
        assert_close(result, want, 1e5)


def test_many_calls_in_one_program() -> None:
    """More than the five commands from which XLA makes a CUDA graph by itself."""
    x, y, w = operands(False)

    def chain(impl: str, x: jax.Array) -> list[jax.Array]:
        results = []
        for factor in range(1, 8):
            results.append(TP(x * factor, y, w, impl=impl))
        return results

    kernels = jax.jit(partial(chain, "cuda"))
    kept = [kernels(x) for _ in range(5)]
    want = chain("xla", x)
    for results in kept:
        assert_close(results, want)


def test_z_is_the_same_every_time() -> None:
    x, y, w = operands(True, "float32")
    function = jax.jit(operation(True))
    first = np.asarray(function(x, y, w))
    for _ in range(10):
        np.testing.assert_array_equal(function(x, y, w), first)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_repeats_stay_within_rounding(dtype: str) -> None:
    given = operands(True, dtype)
    wide = [array.astype("float64") for array in given]
    want = jax.grad(energy(True, "xla"), (0, 1, 2))(*wide)
    function = jax.jit(jax.grad(energy(True), (0, 1, 2)))
    for _ in range(200):
        assert_close(function(*given), want)


def test_an_exported_program_runs() -> None:
    x, y, w = operands(True, "float32")
    function = jax.jit(jax.value_and_grad(energy(True), (0, 1, 2)))
    allowed = [jax.export.DisabledSafetyCheck.custom_call(ffi.TARGET)]
    exported = jax.export.export(function, platforms=["cuda"], disabled_checks=allowed)(x, y, w)
    loaded = jax.export.deserialize(exported.serialize())
    assert loaded.mlir_module().count("stablehlo.custom_call @jaxcg_launch") == 2
    for _ in range(4):
        assert_close(jax.jit(loaded.call)(x, y, w), function(x, y, w))
