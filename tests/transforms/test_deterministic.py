"""`deterministic=True`: the same derivatives, and no kernel that adds atomically."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcg
from jaxcg._coupling import exchange
from jaxcg._primitive import resolve
from tests import emulator
from tests.kernels._check import image

SHARED_SLOTS = jaxcg.TensorProduct(
    "3x0e+3x1o",
    "0e+1o",
    "3x0e+3x1o",
    [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True), (0, 1, 1, "uvu", False), (1, 0, 1, "uvu", True)],
)
PRODUCTS = {
    "mul_ir": jaxcg.TensorProduct.channelwise("9x0e+33x1o", "0e+1o", "0e+1o"),
    "ir_mul": jaxcg.TensorProduct.channelwise("33x0e+5x1o+2x2e", "0e+1o+2e", "0e+1o+2e", layout="ir_mul"),
    "unused-block": jaxcg.TensorProduct.channelwise("7x0e+9x1o+4x0o", "1o", "1o"),
    "shared-slots": SHARED_SLOTS,
}


def derivatives(tp: jaxcg.TensorProduct, deterministic: bool, impl: str):
    """Energy, its gradients, and the gradients of a loss on them."""

    def energy(x: jax.Array, y: jax.Array, w: jax.Array, s: jax.Array, r: jax.Array) -> jax.Array:
        z = tp.convolve(x, y, w, s, r, num_nodes=11, deterministic=deterministic, impl=impl)
        return jnp.sum(z * jnp.cos(z))

    def loss(*operands: jax.Array) -> jax.Array:
        return sum(jnp.sum(g**2) for g in jax.grad(energy, (0, 1, 2))(*operands))

    both = lambda *a: (jax.value_and_grad(energy, (0, 1, 2))(*a), jax.grad(loss, (0, 1, 2))(*a))  # noqa: E731
    return jax.jit(both)


def operands(tp: jaxcg.TensorProduct, seed: int = 3) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    shapes = [(11, tp.irreps_in1.dim), (60, tp.irreps_in2.dim), (60, tp.weight_numel)]
    indices = [jnp.asarray(rng.integers(-1, 12, 60)) for _ in range(2)]  # some edges are absent
    return *(jnp.asarray(rng.standard_normal(shape)) for shape in shapes), *indices


@pytest.mark.parametrize("name", PRODUCTS)
def test_derivatives_are_the_same_and_nothing_is_added_atomically(name: str) -> None:
    tp, texts = PRODUCTS[name], []

    def compile_source(text: str) -> bytes:
        texts.append(text[text.index("struct Args") :])
        return image(text)

    want = jax.tree.leaves(derivatives(tp, False, "xla")(*operands(tp)))
    with emulator.emulated(compile_source):
        run = derivatives(tp, True, "cuda")
        assert run.lower(*operands(tp)).as_text().count("@jaxcg_launch") > 3
        got = jax.tree.leaves(run(*operands(tp)))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11 * np.abs(other).max())
    assert texts and not [text for text in texts if "add_atomically<" in text or "move_run<false" in text]
    # The check can fail: by default gradients of x are added atomically.
    texts.clear()
    with emulator.emulated(lambda text: texts.append(text[text.index("struct Args") :]) or b"not run"):
        derivatives(tp, False, "cuda").lower(*operands(tp))
    assert [text for text in texts if "add_atomically<" in text or "move_run<false" in text]


def test_batches() -> None:
    tp = PRODUCTS["mul_ir"]
    stacked = [jnp.stack(both) for both in zip(operands(tp, 1), operands(tp, 2), strict=True)]
    with emulator.emulated(image):
        got = jax.tree.leaves(jax.vmap(derivatives(tp, True, "cuda"))(*stacked))
    want = jax.tree.leaves(jax.vmap(derivatives(tp, False, "xla"))(*stacked))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11 * np.abs(other).max())


def test_exchanging_twice_is_the_same_coupling() -> None:
    coupling = resolve(PRODUCTS["mul_ir"], True, False, "streamed")
    back = exchange(exchange(coupling))
    for path, again in zip(coupling.paths, back.paths, strict=True):
        assert (path.l1, path.l2, path.l3, path.entries) == (again.l1, again.l2, again.l3, again.entries)
        assert (path.mul1, path.mul_out, path.weight_offset) == (again.mul1, again.mul_out, again.weight_offset)


def test_other_values_raise() -> None:
    tp = PRODUCTS["mul_ir"]
    with pytest.raises(jaxcg.OptionError, match=r"`deterministic`.*True or False"):
        partial(tp.convolve, num_nodes=11, deterministic="yes")(*operands(tp))  # pyright: ignore[reportArgumentType]
