"""Arrays of more than 2^31 elements: offsets must be computed in 64 bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from tests._cases import PRODUCTS

pytestmark = pytest.mark.gpu

DEGREE, NODES = 50, 20_000  # 1,000,000 edges; 2,176 weights each make 2.2e9 elements


def test_weights_of_more_than_2_31_elements() -> None:
    (case,) = (case for case in PRODUCTS if case.name == "mace-large")
    tp = case.product
    edges = DEGREE * NODES
    assert edges * tp.weight_numel > 2**31
    keys = jax.random.split(jax.random.key(0), 6)
    x = jax.random.normal(keys[0], (NODES, tp.irreps_in1.dim), jnp.float32)
    y = jax.random.normal(keys[1], (edges, tp.irreps_in2.dim), jnp.float32)
    w = jax.random.normal(keys[2], (edges, tp.weight_numel), jnp.float32)
    cotangent = jax.random.normal(keys[3], (NODES, tp.irreps_out.dim), jnp.float32)
    senders = jax.random.randint(keys[4], (edges,), 0, NODES)
    receivers = jnp.arange(edges) // DEGREE

    def results(first: int, last: int, x: Array, y: Array, w: Array, cotangent: Array) -> tuple[Array, Array, Array]:
        """z, gradient of y and gradient of w for the receivers in a range, from their own edges only."""
        part = slice(DEGREE * first, DEGREE * last)

        def convolve(y: Array, w: Array) -> Array:
            return tp.convolve(
                x, y, w, senders[part], receivers[part] - first,
                num_nodes=last - first, receivers_sorted=True, impl="cuda",
            )  # fmt: skip

        z, pull = jax.vjp(convolve, y[part], w[part])
        return z, *pull(cotangent[first:last])

    jitted = jax.jit(results, static_argnums=(0, 1))
    run = partial(jitted, x=x, y=y, w=w, cotangent=cotangent)
    whole = run(0, NODES)
    size = NODES // 4
    for start in range(0, NODES, size):
        z, grad_y, grad_w = run(start, start + size)
        edge = slice(DEGREE * start, DEGREE * (start + size))
        # An edge's gradients are summed in the same order whatever the graph around it.
        assert bool(jnp.array_equal(grad_w, whole[2][edge]))
        assert bool(jnp.array_equal(grad_y, whole[1][edge]))
        # Ranges of edges are cut elsewhere: 50 summands in another order.
        bound = (DEGREE + 8) * np.finfo(np.float32).eps * float(jnp.abs(z).max())
        assert float(jnp.abs(z - whole[0][start : start + size]).max()) <= bound
