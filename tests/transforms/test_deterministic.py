"""`deterministic=True` and `compensated=True`: the same derivatives, and no kernel that adds atomically."""

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


def derivatives(tp: jaxcg.TensorProduct, option: str | None, impl: str, order: jaxcg.EdgeOrder | None = None):
    """Energy, its gradients, and the gradients of a loss on them."""
    options = {option: True} if option else {}

    def energy(x: jax.Array, y: jax.Array, w: jax.Array, s: jax.Array, r: jax.Array) -> jax.Array:
        z = tp.convolve(x, y, w, s, r, num_nodes=11, edge_order=order, impl=impl, **options)
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


@pytest.mark.parametrize("name, option", [*((name, "deterministic") for name in PRODUCTS), ("ir_mul", "compensated")])
def test_derivatives_are_the_same_and_nothing_is_added_atomically(name: str, option: str) -> None:
    tp, texts = PRODUCTS[name], []

    def compile_source(text: str) -> bytes:
        texts.append(text[text.index("struct Args") :])
        return image(text)

    want = jax.tree.leaves(derivatives(tp, None, "xla")(*operands(tp)))
    with emulator.emulated(compile_source):
        run = derivatives(tp, option, "cuda")
        assert run.lower(*operands(tp)).as_text().count("@jaxcg_launch") > 3
        got = jax.tree.leaves(run(*operands(tp)))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11 * np.abs(other).max())
    assert texts and not [text for text in texts if "add_atomically<" in text or "move_run<false" in text]
    # The check can fail: by default gradients of x are added atomically.
    texts.clear()
    with emulator.emulated(lambda text: texts.append(text[text.index("struct Args") :]) or b"not run"):
        derivatives(tp, None, "cuda").lower(*operands(tp))
    assert [text for text in texts if "add_atomically<" in text or "move_run<false" in text]


@pytest.mark.parametrize("impl, option", [("cuda", "deterministic"), ("cuda", "compensated"), ("xla", "deterministic")])
def test_an_order_made_once_spares_all_sorting(impl: str, option: str) -> None:
    tp, given = PRODUCTS["mul_ir"], operands(PRODUCTS["mul_ir"])
    order = jaxcg.sort_edges(*given[3:], 11)
    want = jax.tree.leaves(derivatives(tp, None, "xla")(*given))
    with emulator.emulated(image):
        assert ("stablehlo.sort" in derivatives(tp, option, impl).lower(*given).as_text()) == (impl == "cuda")
        run = derivatives(tp, option, impl, order)
        assert "stablehlo.sort" not in run.lower(*given).as_text()
        got = jax.tree.leaves(run(*given))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11 * np.abs(other).max())


def test_batches() -> None:
    tp = PRODUCTS["mul_ir"]
    order = jaxcg.sort_edges(*operands(tp, 1)[3:], 11)
    stacked = [jnp.stack(both) for both in zip(operands(tp, 1), operands(tp, 2), strict=True)]
    with emulator.emulated(image):
        got = jax.tree.leaves(jax.vmap(derivatives(tp, "deterministic", "cuda"))(*stacked))
        # One graph for all: orders are offset as the indices are.
        same = [jnp.stack([stacked[n][0]] * 2) if n > 2 else stacked[n] for n in range(5)]
        ordered = jax.tree.leaves(jax.vmap(derivatives(tp, "deterministic", "cuda", order))(*same))
    want = jax.tree.leaves(jax.vmap(derivatives(tp, None, "xla"))(*stacked))
    for one, other in zip(ordered, jax.tree.leaves(jax.vmap(derivatives(tp, None, "xla"))(*same)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11 * np.abs(other).max())
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11 * np.abs(other).max())


def test_exchanging_twice_is_the_same_coupling() -> None:
    coupling = resolve(PRODUCTS["mul_ir"], True, False, "streamed")
    back = exchange(exchange(coupling))
    for path, again in zip(coupling.paths, back.paths, strict=True):
        assert (path.l1, path.l2, path.l3, path.entries) == (again.l1, again.l2, again.l3, again.entries)
        assert (path.mul1, path.mul_out, path.weight_offset) == (again.mul1, again.mul_out, again.weight_offset)


@pytest.mark.parametrize("option", ["deterministic", "compensated"])
def test_other_values_raise(option: str) -> None:
    tp = PRODUCTS["mul_ir"]
    with pytest.raises(jaxcg.OptionError, match=rf"`{option}`.*True or False"):
        partial(tp.convolve, num_nodes=11, **{option: "yes"})(*operands(tp))  # pyright: ignore[reportArgumentType]
