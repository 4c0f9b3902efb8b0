"""`jaxcg.e3nn` against e3nn-jax: values, irreps, order of channels and gradients, for every kind of irreps."""

import inspect
from collections.abc import Callable
from functools import partial

import e3nn_jax as e3nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcg.e3nn
from jaxcg._errors import IrrepsError, JaxcgError, ShapeError, UnsupportedError

PAIRS = {
    "nequip": ("8x0e+8x1o+4x2e", "0e+1o+2e"),
    "both-parities": ("3x0o+5x0e+2x1o+3x1e", "0e+1o"),
    "unsorted-x": ("2x1o+3x0e+1x2e+4x1o+2x0e", "0e+1o+2e"),
    "unsorted-y": ("3x0e+2x1o", "2e+1o+0e"),
    "many-channels-of-y": ("3x0e+2x1o", "2x0e+3x1o"),
    "equal-blocks-of-y": ("3x0e+2x1o", "0e+0e+1o+1o"),
    "equal-blocks-of-y-apart": ("3x1o+2x1e+2x1o", "1o+0e+2x1o+0e"),
    "empty-blocks": ("0x0e+3x1o+0x2e", "0x1o+0e+1o+0x2e"),
    "all-empty": ("0x1o", "0e"),
    "nothing": ("", "0e"),
    "no-path": ("3x0e", "2e"),
}
KEEP = {
    "string": "0e+1o+2e",
    "irrep": e3nn.Irrep("1o"),
    "irreps": e3nn.Irreps("3x1o+0o"),
    "list": ["0e", e3nn.Irrep("1e")],
}


def normal(irreps: str, shape: tuple[int, ...], dtype: object = jnp.float64, seed: int = 0) -> e3nn.IrrepsArray:
    rng = np.random.default_rng([seed, *irreps.encode()])
    return e3nn.IrrepsArray(irreps, jnp.asarray(rng.normal(size=(*shape, e3nn.Irreps(irreps).dim)), dtype))


def reference(name: str, x: e3nn.IrrepsArray, y: e3nn.IrrepsArray, **options: object) -> e3nn.IrrepsArray:
    """The function of e3nn-jax, compiled (op by op it takes seconds); irreps and zero flags come from the trace."""
    traced = []

    @jax.jit
    def compute(a: jax.Array, b: jax.Array) -> jax.Array:
        first, second = (
            e3nn.IrrepsArray(operand.irreps, array, zero_flags=operand.zero_flags)
            for operand, array in ((x, a), (y, b))
        )
        traced.append(getattr(e3nn, name)(first, second, **options))
        return traced[0].array

    array = compute(x.array, y.array)
    return e3nn.IrrepsArray(traced[0].irreps, array, zero_flags=traced[0].zero_flags)


def assert_close(actual: jax.Array, expected: jax.Array, factor: float = 1.0) -> None:
    """Equal to rounding: sums of at most some hundred terms of the size of the largest entry."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    largest = np.abs(expected).max(initial=0.0)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=factor * 32 * np.finfo(expected.dtype).eps * largest)


def assert_same(actual: e3nn.IrrepsArray, expected: e3nn.IrrepsArray, factor: float = 1.0) -> None:
    assert tuple(actual.irreps) == tuple(expected.irreps)
    assert actual.zero_flags == expected.zero_flags
    assert_close(actual.array, expected.array, factor)


@pytest.mark.parametrize("name", ["tensor_product", "elementwise_tensor_product"])
def test_signature_is_that_of_e3nn(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (jaxcg.e3nn, e3nn))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize("regroup_output", [True, False])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_tensor_product_equals_e3nn(pair: tuple[str, str], regroup_output: bool) -> None:
    x, y = normal(pair[0], (5, 1)), normal(pair[1], (3,), seed=1)
    options = {"regroup_output": regroup_output}
    assert_same(jaxcg.e3nn.tensor_product(x, y, **options), reference("tensor_product", x, y, **options))
    expected = tuple(e3nn.tensor_product(*pair, **options))
    for first, second in [pair, (e3nn.Irreps(pair[0]), pair[1]), (pair[0], y), (x, pair[1])]:
        irreps = jaxcg.e3nn.tensor_product(first, second, **options)
        assert isinstance(irreps, e3nn.Irreps)
        assert tuple(irreps) == expected


@pytest.mark.parametrize("regroup_output", [True, False])
@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
def test_every_form_of_filter(keep: object, regroup_output: bool) -> None:
    x, y = normal("2x1o+3x0e+4x1o", (2,)), normal("0e+2x1o", (2,))
    options = {"filter_ir_out": keep, "regroup_output": regroup_output}
    assert_same(jaxcg.e3nn.tensor_product(x, y, **options), reference("tensor_product", x, y, **options))
    assert jaxcg.e3nn.tensor_product(x.irreps, y, **options) == e3nn.tensor_product(x.irreps, y.irreps, **options)


@pytest.mark.parametrize("normalization", [None, "component", "norm", "none"])
def test_tensor_product_normalizations(normalization: str | None) -> None:
    x, y = normal("3x0e+2x1o", (4,)), normal("2x1o+2e", (4,))
    options = {"irrep_normalization": normalization}
    assert_same(jaxcg.e3nn.tensor_product(x, y, **options), reference("tensor_product", x, y, **options))
    try:
        e3nn.config("irrep_normalization", "norm")
        assert_same(jaxcg.e3nn.tensor_product(x, y, **options), reference("tensor_product", x, y, **options))
    finally:
        e3nn.config("irrep_normalization", "component")


@pytest.mark.parametrize("regroup_output", [True, False])
def test_blocks_known_to_be_zero_stay_so(regroup_output: bool) -> None:
    full = normal("2x0e+3x1o+1x1o+2x2e", (4,))
    x = e3nn.from_chunks(full.irreps, [full.chunks[0], None, full.chunks[2], None], (4,))
    y = e3nn.from_chunks("0e+1o", [None, normal("1o", (4,)).chunks[0]], (4,))
    options = {"regroup_output": regroup_output}
    assert_same(jaxcg.e3nn.tensor_product(x, y, **options), reference("tensor_product", x, y, **options))
    zero = e3nn.from_chunks("0e", [None], (4,), jnp.float64)
    assert_same(jaxcg.e3nn.tensor_product(x, zero, **options), reference("tensor_product", x, zero, **options))


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "float64"), ("int32", "float32")], ids=str)
def test_dtypes_promote_as_in_e3nn(dtypes: tuple[str, str]) -> None:
    x, y = normal("2x0e+3x1o", (4,), dtypes[0]), normal("0e+1o", (4,), dtypes[1])
    assert_same(jaxcg.e3nn.tensor_product(x, y), reference("tensor_product", x, y))


def test_plain_arrays_are_scalars() -> None:
    x, y = jnp.arange(6.0).reshape(2, 3), normal("2x1o", (2,))
    assert_same(jaxcg.e3nn.tensor_product(x, y), e3nn.tensor_product(x, y))


@pytest.mark.parametrize("pair", [PAIRS[name] for name in ("unsorted-x", "equal-blocks-of-y-apart")], ids=str)
def test_gradients_of_tensor_product_equal_those_of_e3nn(pair: tuple[str, str]) -> None:
    x, y = normal(pair[0], (4,)), normal(pair[1], (4,))

    def loss(function: Callable[..., e3nn.IrrepsArray]) -> Callable[..., jax.Array]:
        return lambda x, y: jnp.sum(jnp.sin(function(x, y).array))

    ours = jax.jit(jax.grad(loss(jaxcg.e3nn.tensor_product), argnums=(0, 1)))(x, y)
    theirs = jax.jit(jax.grad(loss(e3nn.tensor_product), argnums=(0, 1)))(x, y)
    for mine, reference in zip(ours, theirs, strict=True):
        assert_same(mine, reference, factor=4)


@pytest.mark.parametrize("keep", [None, "0e+1e"], ids=str)
@pytest.mark.parametrize("pair", [("2x0e+1o", "1e+0o+0o"), ("4x1o+2e", "1e+3x2o+1x0e"), ("3x1o+0x2e", "3x1o")], ids=str)
def test_elementwise_equals_e3nn(pair: tuple[str, str], keep: str | None) -> None:
    x, y = normal(pair[0], (5, 1)), normal(pair[1], (3,), seed=1)
    if "0x" not in pair[0]:  # e3nn fails there
        expected = reference("elementwise_tensor_product", x, y, filter_ir_out=keep)
        assert_same(jaxcg.e3nn.elementwise_tensor_product(x, y, filter_ir_out=keep), expected)
        assert jaxcg.e3nn.elementwise_tensor_product(*pair, filter_ir_out=keep) == expected.irreps
    else:
        same = jaxcg.e3nn.elementwise_tensor_product(x.simplify(), y, filter_ir_out=keep)
        assert_same(jaxcg.e3nn.elementwise_tensor_product(x, y, filter_ir_out=keep), same)
    with pytest.raises(IrrepsError, match="as many channels"):
        jaxcg.e3nn.elementwise_tensor_product(x, normal("2x0e", (3,)))


# ---- convolve

NODES, EDGES = 5, 12
SENDERS = jnp.asarray([0, 1, 1, 4, 2, 2, 0, 3, 4, 4, 1, 0])
RECEIVERS = jnp.asarray([1, 0, 4, 1, 2, 1, 1, 0, 4, 2, 0, 1])  # node 3 receives nothing; repeated and self edges


@partial(jax.jit, static_argnums=(3, 4))
def message_passing(
    x: e3nn.IrrepsArray, y: e3nn.IrrepsArray, w: jax.Array | None, keep: object, scale: float
) -> e3nn.IrrepsArray:
    """The layer that `convolve` replaces."""
    messages = e3nn.tensor_product(x[SENDERS], y, filter_ir_out=keep)
    if w is not None:
        messages = messages * w
    z = e3nn.scatter_sum(messages, dst=RECEIVERS, output_size=NODES)
    return e3nn.IrrepsArray(z.irreps, z.array * scale)


def operands(pair: tuple[str, str], keep: object, dtype: str) -> tuple[e3nn.IrrepsArray, e3nn.IrrepsArray, jax.Array]:
    num = jaxcg.e3nn.message_irreps(*pair, keep).num_irreps
    w = np.random.default_rng(3).normal(size=(EDGES, num))
    return normal(pair[0], (NODES,), dtype), normal(pair[1], (EDGES,), dtype, seed=1), jnp.asarray(w, dtype)


@pytest.mark.parametrize(("dtype", "keep"), [("float64", None), ("float32", "0e+1o+2e")], ids=str)
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_convolve_equals_the_layer_it_replaces(pair: tuple[str, str], keep: str | None, dtype: str) -> None:
    x, y, w = operands(pair, keep, dtype)
    # e3nn's product with weights fails when there is no channel.
    expected = message_passing(x, y, w if w.size else None, keep, 0.5)
    options = {"num_nodes": NODES, "filter_ir_out": keep, "scale": 0.5}
    actual = jax.jit(lambda *a: jaxcg.e3nn.convolve(*a, **options))(x, y, w, SENDERS, RECEIVERS)
    assert tuple(actual.irreps) == tuple(expected.irreps)
    assert actual.irreps == jaxcg.e3nn.message_irreps(*pair, keep)
    assert_close(actual.array, expected.array, factor=2)


@pytest.mark.parametrize("pair", [PAIRS[name] for name in ("nequip", "unsorted-x", "many-channels-of-y")], ids=str)
def test_gradients_of_convolve_equal_those_of_the_layer(pair: tuple[str, str]) -> None:
    keep = "0e+1o"
    x, y, w = operands(pair, keep, "float64")

    def ours(x: e3nn.IrrepsArray, y: e3nn.IrrepsArray, w: jax.Array) -> jax.Array:
        z = jaxcg.e3nn.convolve(x, y, w, SENDERS, RECEIVERS, num_nodes=NODES, filter_ir_out=keep)
        return jnp.sum(jnp.sin(z.array))

    def theirs(x: e3nn.IrrepsArray, y: e3nn.IrrepsArray, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(message_passing(x, y, w, keep, 1.0).array))

    for order in (1, 2) if pair == PAIRS["unsorted-x"] else (1,):
        gradients = []
        for function in (ours, theirs):
            if order == 2:  # as training on forces: a gradient of a function of the gradient with respect to y
                inner = jax.grad(function, argnums=1)
                function = lambda x, y, w, inner=inner: jnp.sum(inner(x, y, w).array ** 2)  # noqa: E731
            gradients.append(jax.tree.leaves(jax.jit(jax.grad(function, argnums=(0, 1, 2)))(x, y, w)))
        for mine, reference in zip(*gradients, strict=True):
            assert_close(mine, reference, factor=16)


def test_convolve_weights_shared_scalar_irreps_or_absent() -> None:
    pair, keep = PAIRS["nequip"], "0e+1o"
    x, y, w = operands(pair, keep, "float64")
    options = {"num_nodes": NODES, "filter_ir_out": keep}
    shared = jaxcg.e3nn.convolve(x, y, w[0], SENDERS, RECEIVERS, **options)
    assert_close(shared.array, message_passing(x, y, jnp.broadcast_to(w[0], w.shape), keep, 1.0).array, factor=2)
    scalars = jaxcg.e3nn.convolve(x, y, e3nn.as_irreps_array(w), SENDERS, RECEIVERS, **options)
    assert_close(scalars.array, message_passing(x, y, w, keep, 1.0).array, factor=2)
    bare = jaxcg.e3nn.convolve(x, y, None, SENDERS, RECEIVERS, **options)
    assert_close(bare.array, message_passing(x, y, None, keep, 1.0).array, factor=2)


def test_convolve_takes_an_edge_order_and_sorted_receivers() -> None:
    pair, keep = PAIRS["nequip"], "0e+1o"
    x, y, w = operands(pair, keep, "float64")
    expected = message_passing(x, y, w, keep, 1.0).array
    options = {"num_nodes": NODES, "filter_ir_out": keep}
    order = jaxcg.sort_edges(SENDERS, RECEIVERS, NODES)
    by_order = jaxcg.e3nn.convolve(x, y, w, SENDERS, RECEIVERS, edge_order=order, **options)
    assert_close(by_order.array, expected, factor=2)
    at = jnp.argsort(RECEIVERS, stable=True)
    by_claim = jaxcg.e3nn.convolve(x, y[at], w[at], SENDERS[at], RECEIVERS[at], receivers_sorted=True, **options)
    assert_close(by_claim.array, expected, factor=2)


def test_convolve_is_equivariant() -> None:
    pair, keep = ("4x0e+3x1o+2x1e", "0e+1o+2e"), "0e+0o+1o+1e+2e"
    w = operands(pair, keep, "float32")[2]

    def layer(x: e3nn.IrrepsArray, y: e3nn.IrrepsArray) -> e3nn.IrrepsArray:
        return jaxcg.e3nn.convolve(x, y, w, SENDERS, RECEIVERS, num_nodes=NODES, filter_ir_out=keep)

    x, y = normal(pair[0], (NODES,), "float32"), normal(pair[1], (EDGES,), "float32")
    e3nn.utils.assert_equivariant(layer, jax.random.key(0), x, y)


def test_generated_kernels_can_run_convolve_on_spherical_harmonics() -> None:
    for name in ("nequip", "both-parities", "unsorted-x", "unsorted-y", "empty-blocks"):
        irreps_x, irreps_y = map(e3nn.Irreps, PAIRS[name])
        assert jaxcg.e3nn._message_product(irreps_x, irreps_y.simplify(), None, True).kernel_support().ok, name
    x, y, w = operands(PAIRS["many-channels-of-y"], None, "float32")
    with pytest.raises(UnsupportedError, match="uvuv"):
        jaxcg.e3nn.convolve(x, y, w, SENDERS, RECEIVERS, num_nodes=NODES, impl="cuda")


def test_errors_name_argument_expected_and_received() -> None:
    x, y, w = operands(PAIRS["nequip"], "0e", "float32")
    options = {"num_nodes": NODES, "filter_ir_out": "0e"}
    with pytest.raises(ShapeError, match=r"`w` .*20.* got shape \[12, 19\]"):
        jaxcg.e3nn.convolve(x, y, w[:, 1:], SENDERS, RECEIVERS, **options)
    with pytest.raises(ShapeError, match="`y` "):
        jaxcg.e3nn.convolve(x, y[1:], w, SENDERS, RECEIVERS, **options)
    with pytest.raises(IrrepsError, match=r"`w` must be scalars \(0e\), got .*1o"):
        jaxcg.e3nn.convolve(x, y, normal("1o", (EDGES,)), SENDERS, RECEIVERS, **options)
    with pytest.raises(JaxcgError, match="float32"):
        jaxcg.e3nn.tensor_product(normal("1o", (2,), jnp.bfloat16), normal("1o", (2,), jnp.bfloat16))
