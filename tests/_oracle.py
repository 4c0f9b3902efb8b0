"""What tests of the two operations share: small problems, e3nn-jax as oracle, and the tolerance."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import e3nn_jax as e3nn
import jax
import jax.numpy as jnp
import numpy as np
from e3nn_jax.legacy import FunctionalTensorProduct

import jaxcg

# Multiplicities that fit no vector width, both parities.
WIDE = jaxcg.TensorProduct.channelwise("33x0e+5x1o+5x1e", "0e+1o", "0e+1o+1e")
SMALL = jaxcg.TensorProduct.channelwise("3x0e+2x1o+1e", "0e+1o", "0e+1o+1e")
SCALARS = jaxcg.TensorProduct.channelwise("2x0e+1o", "1o", "0e+1o")

Function = Callable[..., Any]


@dataclass(frozen=True)
class Problem:
    """A product with its operands on a graph; `w` is None when no path has weights."""

    tp: jaxcg.TensorProduct
    x: jax.Array
    y: jax.Array
    w: jax.Array | None
    senders: jax.Array
    receivers: jax.Array
    num_nodes: int

    @classmethod
    def random(
        cls,
        tp: jaxcg.TensorProduct,
        *,
        nodes: int = 5,
        edges: int = 9,
        senders: int | None = None,
        shared: bool = False,
        dtype: str = "float64",
        seed: int = 0,
    ) -> Self:
        """Standard normal operands; unsorted edges with a repeated and a self edge, the last node isolated."""
        rng = np.random.default_rng(seed)
        num_x = nodes if senders is None else senders
        sent, received = rng.integers(0, num_x, edges), rng.integers(0, max(1, nodes - 1), edges)
        if edges > 3:
            sent[1], received[1] = sent[0], received[0]
            sent[2] = received[2] = 0
        weights = (tp.weight_numel,) if shared else (edges, tp.weight_numel)

        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape), dtype)

        return cls(
            tp,
            normal(num_x, tp.irreps_in1.dim),
            normal(edges, tp.irreps_in2.dim),
            normal(*weights) if tp.weight_numel else None,
            jnp.asarray(sent, jnp.int32),
            jnp.asarray(received, jnp.int32),
            nodes,
        )

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        return (self.x, self.y) if self.w is None else (self.x, self.y, self.w)

    def tangents(self, seed: int = 7) -> tuple[jax.Array, ...]:
        """Standard normal arrays like the operands."""
        rng = np.random.default_rng(seed)
        return tuple(jnp.asarray(rng.standard_normal(v.shape), v.dtype) for v in self.operands)

    def cotangent(self, seed: int = 8) -> jax.Array:
        """Standard normal array like the result of the convolution."""
        shape = (self.num_nodes, self.tp.irreps_out.dim)
        return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), self.x.dtype)

    def convolve(self, *operands: jax.Array, **options: Any) -> jax.Array:
        """The convolution as a function of x, y and w."""
        x, y, w = (*operands, None)[:3]
        return self.tp.convolve(x, y, w, self.senders, self.receivers, num_nodes=self.num_nodes, **options)

    def convolve_by_e3nn(self, *operands: jax.Array) -> jax.Array:
        """The same by e3nn-jax: gather, product of every row, segment sum."""
        x, y, w = (*operands, None)[:3]
        return convolve_by_e3nn(self.tp, x, y, w, self.senders, self.receivers, self.num_nodes)

    def on_rows(self) -> "Problem":
        """The same operands for the plain product: row e of x for edge e."""
        return replace(self, x=self.x[self.senders], num_nodes=self.senders.shape[0])

    def multiply(self, *operands: jax.Array, **options: Any) -> jax.Array:
        """The plain product as a function of x, y and w."""
        return self.tp(*operands, **options)

    def multiply_by_e3nn(self, *operands: jax.Array) -> jax.Array:
        """The same by e3nn-jax."""
        return rows_by_e3nn(self.tp, *operands)


def _to_ir_mul(z: jax.Array, irreps: e3nn.Irreps, inverse: bool = False) -> jax.Array:
    parts = []
    for (mul, ir), part in zip(irreps, irreps.slices(), strict=True):
        block = z[..., part].reshape(*z.shape[:-1], *((ir.dim, mul) if inverse else (mul, ir.dim)))
        parts.append(block.swapaxes(-1, -2).reshape(*z.shape[:-1], -1))
    return jnp.concatenate(parts, axis=-1) if parts else z


def rows_by_e3nn(tp: jaxcg.TensorProduct, x: jax.Array, y: jax.Array, w: jax.Array | None = None) -> jax.Array:
    """The product of every row (one leading axis) by `e3nn_jax.legacy.FunctionalTensorProduct`."""
    theirs = FunctionalTensorProduct(
        tp.irreps_in1, tp.irreps_in2, tp.irreps_out, list(tp.instructions),
        irrep_normalization=tp.irrep_normalization, path_normalization=tp.path_normalization,
        gradient_normalization="path",
    )  # fmt: skip
    if tp.layout == "ir_mul":
        x = _to_ir_mul(x, tp.irreps_in1, inverse=True)

    def one(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        z = theirs.left_right(w, e3nn.IrrepsArray(tp.irreps_in1, x), e3nn.IrrepsArray(tp.irreps_in2, y))
        return z.array

    w = jnp.zeros((0,), x.dtype) if w is None else w
    z = jax.vmap(one, in_axes=(0, 0, None if w.ndim == 1 else 0))(x, y, w)
    return _to_ir_mul(z, tp.irreps_out) if tp.layout == "ir_mul" else z


def convolve_by_e3nn(
    tp: jaxcg.TensorProduct,
    x: jax.Array,
    y: jax.Array,
    w: jax.Array | None,
    senders: jax.Array,
    receivers: jax.Array,
    num_nodes: int,
) -> jax.Array:
    """The convolution by e3nn-jax, absent edges left out by zeros in place of all that they read."""
    present = (senders >= 0) & (senders < x.shape[0]) & (receivers >= 0) & (receivers < num_nodes)
    rows = jnp.where(present[:, None], x[jnp.where(present, senders, 0)], 0)
    y = jnp.where(present[:, None], y, 0)
    if w is not None and w.ndim == 2:
        w = jnp.where(present[:, None], w, 0)
    messages = jnp.where(present[:, None], rows_by_e3nn(tp, rows, y, w), 0)
    return jax.ops.segment_sum(messages, jnp.where(present, receivers, 0), num_nodes)


def assert_close(actual: Any, expected: Any, *, summands: int = 64, what: str = "") -> None:
    """Compare two trees of arrays, every array on its own.

    An array that is computed in floating point as sums of n products carries an error of about (8 + sqrt(n)) eps
    times the sum of the magnitudes of the products: 8 roundings in one product, sqrt(n) in the running sum. With
    signs at random that sum is sqrt(n) times a typical result, for which the largest of the array stands.
    """
    leaves, expected_leaves = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(leaves) == len(expected_leaves), what
    for number, (got, want) in enumerate(zip(leaves, expected_leaves, strict=True)):
        where = f"{what} output {number}"
        assert got.shape == want.shape, f"{where}: shape {got.shape} instead of {want.shape}"
        eps = float(jnp.finfo(got.dtype).eps)
        got, want = np.asarray(got, "float64"), np.asarray(want, "float64")
        scale = np.abs(want).max(initial=0.0)
        bound = (8 + summands**0.5) * summands**0.5 * eps * scale
        np.testing.assert_allclose(got, want, rtol=0, atol=bound, err_msg=where)


def assert_nonzero(*arrays: jax.Array) -> None:
    """Every array holds something: what is compared is not 0 = 0."""
    for number, array in enumerate(arrays):
        assert np.abs(np.asarray(array)).max(initial=0.0) > 0, f"array {number} of {len(arrays)} is zero"


def equations(jaxpr: Any, primitive: str = "jaxcg_product") -> list[Any]:
    """All equations of one primitive in a jaxpr, the jaxprs inside its equations included."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            found.append(equation)
        for value in equation.params.values():
            for inner in value if isinstance(value, Sequence) and not isinstance(value, str) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += equations(inner, primitive)
    return found


@contextlib.contextmanager
def quick_compilation(enabled: bool = True) -> Iterator[None]:
    """XLA without its costly passes: 2 to 3 times faster for programs that run on a few rows."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", enabled)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@contextlib.contextmanager
def x64(enabled: bool) -> Iterator[None]:
    """Whether JAX has 64-bit types inside. (`jax.enable_x64` is not in every JAX that is tested.)"""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", enabled)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
