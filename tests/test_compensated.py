"""`compensated=True`: the error of a sum over edges does not grow with their number.

With scalars and a coupling of 1 every message is a product of two numbers of few bits, so exact: all error is the
sum's.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcg
from jaxcg import _reference
from tests import emulator
from tests.kernels._check import image

SCALARS = jaxcg.TensorProduct.channelwise("33x0e", "0e", "0e", layout="ir_mul")
EDGES, NODES = 24_000, 2
EPS = float(np.finfo("float32").eps)


def operands(seed: int) -> tuple[jax.Array, ...]:
    """Features, and a graph of few nodes with many edges each, of very different size at each node."""
    rng = np.random.default_rng(seed)
    few_bits = lambda shape: jnp.asarray(rng.integers(1, 4096, shape) / 4096, "float32")  # noqa: E731
    nodes = jnp.asarray(rng.integers(0, NODES, EDGES))  # of both ends, so that no sum mixes the two sizes
    w = few_bits((EDGES, 33)) * jnp.where(nodes == 0, 1, 1024).astype("float32")[:, None]
    return few_bits((NODES, 33)), jnp.ones((EDGES, 1), "float32"), w, nodes, nodes


def sums(impl: str, compensated: bool, *operands: jax.Array) -> dict[str, np.ndarray]:
    """z and, with a cotangent of ones, the gradient of x: both are sums over edges."""

    def convolve(x: jax.Array, y: jax.Array, w: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        return SCALARS.convolve(x, y, w, senders, receivers, num_nodes=NODES, compensated=compensated, impl=impl)

    z, pull = jax.vjp(partial(convolve), *operands)
    return {"z": np.asarray(z), "x": np.asarray(pull(jnp.ones_like(z))[0])}


def worst(found: dict[str, np.ndarray], *operands: jax.Array) -> dict[str, float]:
    """Largest error of each sum, in units of eps times the sum itself."""
    x, y, w, senders, receivers = (np.asarray(a, "float64" if a.ndim > 1 else None) for a in operands)
    z, gx = np.zeros((NODES, 33)), np.zeros((NODES, 33))
    np.add.at(z, receivers, x[senders] * y * w)
    np.add.at(gx, senders, y * w)
    exact = {"z": z, "x": gx}
    return {name: float(np.max(np.abs(found[name] - exact[name]) / np.abs(exact[name]))) / EPS for name in exact}


@pytest.mark.parametrize("blocks", [1, 7])
def test_kernels(blocks: int, seed: int) -> None:
    given = operands(seed)
    with emulator.emulated(image), emulator.settings(blocks=blocks):
        # Kahan's bound is two roundings, whatever the number of summands.
        assert all(error <= 2 for error in worst(sums("cuda", True, *given), *given).values())
        # The check can fail: plain sums are further off, gradients of x most, which are added one by one.
        assert worst(sums("cuda", False, *given), *given)["x"] > 2


@pytest.mark.parametrize("block", [64, EDGES])
def test_xla(block: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_reference, "block_rows", lambda coupling: block)
    jax.clear_caches()
    given = operands(seed)
    assert all(error <= 2 for error in worst(sums("xla", True, *given), *given).values())
    assert all(error > 2 for error in worst(sums("xla", False, *given), *given).values())


def test_a_sum_that_leaves_the_range_stays_infinite_and_alone() -> None:
    x, y, w, senders, receivers = operands(0)
    for part in (x.at[0, 0].set(jnp.inf), x.at[0, 0].set(3e38)):
        z = SCALARS.convolve(part, y, w, senders, receivers, num_nodes=NODES, compensated=True, impl="xla")
        assert bool(jnp.isposinf(z[0, 0])) and int(jnp.sum(jnp.isfinite(z))) == z.size - 1
