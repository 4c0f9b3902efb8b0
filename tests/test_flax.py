"""`jaxcg.flax`: both modules in linen and nnx against e3nn-jax with the same parameters, values and gradients."""

import subprocess
import sys
from functools import partial

import e3nn_jax as e3nn
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcg
import jaxcg.flax.linen
import jaxcg.flax.nnx
from jaxcg._errors import IrrepsError
from tests._oracle import equations

IRREPS_X, IRREPS_Y, KEEP, HIDDEN = "4x0e+3x1o+2x1e", "0e+1o", "0e+1o+1e", (6, 5)
NODES, EDGES, RADIAL = 5, 9, 4
SENDERS = jnp.asarray([0, 1, 1, 4, 2, 2, 0, 3, 4])
RECEIVERS = jnp.asarray([1, 0, 4, 1, 2, 1, 1, 0, 4])


@pytest.fixture(params=["float32", "float64"])
def operands(request: pytest.FixtureRequest) -> tuple[e3nn.IrrepsArray, e3nn.IrrepsArray, jax.Array]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(NODES, e3nn.Irreps(IRREPS_X).dim)), rng.normal(size=(EDGES, e3nn.Irreps(IRREPS_Y).dim))
    radial = jnp.asarray(rng.normal(size=(EDGES, RADIAL)), request.param)
    return (
        e3nn.IrrepsArray(IRREPS_X, jnp.asarray(x, request.param)),
        e3nn.IrrepsArray(IRREPS_Y, jnp.asarray(y, request.param)),
        radial,
    )


def network(kernels: list[jax.Array], radial: jax.Array) -> jax.Array:
    """The radial network written out; silu over its root mean square, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    scale = np.sqrt(np.sum(weights * (nodes / (1 + np.exp(-nodes))) ** 2) / np.sqrt(2 * np.pi))
    value = radial
    for kernel in kernels[:-1]:
        value = jax.nn.silu(value @ kernel) / float(scale)
    return value @ kernels[-1]


def expected(
    kind: str, kernels: list[jax.Array], x: e3nn.IrrepsArray, y: e3nn.IrrepsArray, radial: jax.Array
) -> jax.Array:
    """The product row by row, or summed at the receivers and halved."""
    messages = e3nn.tensor_product(x[SENDERS], y, filter_ir_out=KEEP) * network(kernels, radial)
    if kind == "product":
        return messages.array
    return 0.5 * e3nn.scatter_sum(messages, dst=RECEIVERS, output_size=NODES).array


def linen_case(kind: str, x: e3nn.IrrepsArray, y: e3nn.IrrepsArray, radial: jax.Array):
    options = {"filter_ir_out": KEEP, "hidden": HIDDEN}
    if kind == "product":
        module, arguments = jaxcg.flax.linen.TensorProduct(**options), ()
    else:
        module, arguments = jaxcg.flax.linen.Convolution(**options, scale=0.5), (SENDERS, RECEIVERS)
    gather = (lambda x: x[SENDERS]) if kind == "product" else (lambda x: x)
    variables = module.init(jax.random.key(0), gather(x), y, radial, *arguments)
    kernels = [variables["params"]["radial"][f"layer_{n}"]["kernel"] for n in range(3)]

    def apply(kernels, x, y, radial):
        params = {"radial": {f"layer_{n}": {"kernel": kernel} for n, kernel in enumerate(kernels)}}
        return module.apply({"params": params}, gather(x), y, radial, *arguments).array

    return apply, kernels


def nnx_case(kind: str, x: e3nn.IrrepsArray, y: e3nn.IrrepsArray, radial: jax.Array):
    options = {"filter_ir_out": KEEP, "hidden": HIDDEN, "param_dtype": radial.dtype, "rngs": nnx.Rngs(0)}
    arguments = (IRREPS_X, IRREPS_Y, RADIAL)
    if kind == "product":
        module = jaxcg.flax.nnx.TensorProduct(*arguments, **options)
    else:
        module = jaxcg.flax.nnx.Convolution(*arguments, **options, scale=0.5)
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    sizes = [(RADIAL, 6), (6, 5), (5, module.irreps_out.num_irreps)]
    assert [leaf.shape for leaf in leaves] == sizes

    def apply(kernels, x, y, radial):
        layer = nnx.merge(graph, jax.tree.unflatten(tree, kernels))
        z = layer(x[SENDERS], y, radial) if kind == "product" else layer(x, y, radial, SENDERS, RECEIVERS)
        assert z.irreps == layer.irreps_out
        return z.array

    return apply, leaves


@pytest.mark.parametrize("kind", ["product", "convolution"])
@pytest.mark.parametrize("case", [linen_case, nnx_case], ids=["linen", "nnx"])
def test_values_and_gradients_equal_e3nn(case, kind: str, operands) -> None:
    x, y, radial = operands
    ours, kernels = case(kind, x, y, radial)
    assert {kernel.dtype for kernel in kernels} == {radial.dtype}
    theirs = lambda *arguments: expected(kind, *arguments)  # noqa: E731
    weights = np.random.default_rng(1).normal(size=jax.eval_shape(theirs, kernels, *operands).shape)

    def evaluate(function):
        def loss(kernels, x, y, radial):
            z = function(kernels, x, y, radial)
            return jnp.sum(jnp.asarray(weights, z.dtype) * z), z

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(kernels, x, y, radial)

    mine, reference = (jax.tree.leaves(evaluate(function)) for function in (ours, theirs))
    assert len(mine) == len(reference) == 3 + 3 + 1
    eps = np.finfo(radial.dtype).eps
    for a, b in zip(mine, reference, strict=True):
        assert a.dtype == b.dtype == radial.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=64 * eps * np.abs(b).max())
    assert np.abs(reference[-1]).max() > 0.1


@pytest.mark.parametrize("case", [linen_case, nnx_case], ids=["linen", "nnx"])
def test_weights_vanish_where_radial_features_do(case, operands) -> None:
    x, y, radial = operands
    apply, kernels = case("product", x, y, radial)
    assert np.all(np.asarray(apply(kernels, x, y, jnp.zeros_like(radial))) == 0)


def test_linen_options(operands) -> None:
    x, y, radial = operands
    layer = jaxcg.flax.linen.Convolution(filter_ir_out="0e", hidden=(), activation=nn.tanh, param_dtype=jnp.float32)
    variables = layer.init(jax.random.key(0), x, y, radial, SENDERS, RECEIVERS)
    (kernel,) = jax.tree.leaves(variables)
    assert kernel.shape == (RADIAL, jaxcg.e3nn.message_irreps(IRREPS_X, IRREPS_Y, "0e").num_irreps)
    assert kernel.dtype == jnp.float32
    z = layer.apply(variables, x, y, radial, SENDERS, RECEIVERS)
    assert z.array.dtype == radial.dtype
    # Nodes beyond those of x receive nothing; fewer than receivers mention drop the rest.
    more = layer.apply(variables, x, y, radial, SENDERS, RECEIVERS, num_nodes=NODES + 2)
    np.testing.assert_array_equal(more.array[:NODES], z.array)
    np.testing.assert_array_equal(more.array[NODES:], 0)
    order = jaxcg.sort_edges(SENDERS, RECEIVERS, NODES)
    ordered = layer.apply(variables, x, y, radial, SENDERS, RECEIVERS, edge_order=order)
    np.testing.assert_allclose(ordered.array, z.array, rtol=0, atol=1e-6)


def test_nnx_module_trains_and_checks_irreps(operands) -> None:
    x, y, radial = operands
    rngs = nnx.Rngs(0)
    layer = jaxcg.flax.nnx.Convolution(IRREPS_X, IRREPS_Y, RADIAL, filter_ir_out=["0e"], hidden=(4,), rngs=rngs)
    assert layer.irreps_out == e3nn.Irreps("7x0e")

    @nnx.jit
    def gradient(layer):
        return nnx.grad(lambda layer: jnp.sum(layer(x, y, radial, SENDERS, RECEIVERS).array ** 2))(layer)

    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient(layer)))
    with pytest.raises(IrrepsError, match=r"`x` must be an array of the irreps given at construction, 4x0e.*got 3x0e"):
        layer(e3nn.ones("3x0e", (NODES,)), y, radial, SENDERS, RECEIVERS)


@pytest.mark.parametrize("option", ["deterministic", "compensated"])
def test_options_of_sums_reach_the_kernels(operands, option: str) -> None:
    x, y, radial = operands
    linen = jaxcg.flax.linen.Convolution(filter_ir_out="0e")
    variables = linen.init(jax.random.key(0), x, y, radial, SENDERS, RECEIVERS)
    given = jaxcg.flax.nnx.Convolution(IRREPS_X, IRREPS_Y, RADIAL, filter_ir_out="0e", rngs=nnx.Rngs(0))
    for layer in (partial(linen.apply, variables), given):
        for value in (False, True):
            options = {option: value} if value else {}
            run = lambda *a, layer=layer, options=options: layer(*a, SENDERS, RECEIVERS, **options).array  # noqa: E731
            calls = [found.params["call"] for found in equations(jax.make_jaxpr(run)(x, y, radial).jaxpr)]
            assert calls and all(getattr(call, option) == value for call in calls)


def test_importing_jaxcg_does_not_import_flax() -> None:
    code = """
import sys, jaxcg
assert not any(name.split(".")[0] == "flax" for name in sys.modules), "flax was imported"
import jaxcg.flax
assert "jaxcg.flax.linen" not in sys.modules and "jaxcg.flax.nnx" not in sys.modules
jaxcg.flax.linen.Convolution, jaxcg.flax.nnx.TensorProduct
"""
    # e3nn-jax imports flax when it is installed; hide that.
    hide = "import sys; sys.modules['flax'] = None\nimport e3nn_jax\ndel sys.modules['flax']\n"
    subprocess.run([sys.executable, "-c", hide + code], check=True, timeout=120)


def test_without_flax_the_error_names_the_fix() -> None:
    code = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "flax" else find(name, *a)
try:
    import jaxcg.flax
except ImportError as error:
    assert "pip install 'jaxcg[flax]'" in str(error), error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_messages_that_the_filter_leaves_empty(kind: str) -> None:
    x, y, radial = e3nn.ones("2x0e", (3,)), e3nn.ones("0e", (4,)), jnp.ones((4, 5))
    index = jnp.arange(4) % 3
    if kind == "linen":
        module = jaxcg.flax.linen.Convolution(filter_ir_out="1o")
        z = module.apply(module.init(jax.random.key(0), x, y, radial, index, index), x, y, radial, index, index)
    else:
        z = jaxcg.flax.nnx.Convolution("2x0e", "0e", 5, filter_ir_out="1o", rngs=nnx.Rngs(0))(
            x, y, radial, index, index
        )
    assert z.shape == (3, 0)


@pytest.mark.parametrize("hidden", [16, (16, 0), "16"])
def test_widths_of_hidden_layers_are_checked(hidden: object) -> None:
    x, y, radial, index = e3nn.ones("2x0e", (3,)), e3nn.ones("0e", (4,)), jnp.ones((4, 5)), jnp.arange(4) % 3
    with pytest.raises(jaxcg.OptionError, match=r"`hidden`.*such as \(64,\), got"):
        jaxcg.flax.linen.Convolution(hidden=hidden).init(jax.random.key(0), x, y, radial, index, index)
    with pytest.raises(jaxcg.OptionError, match=r"`hidden`.*such as \(64,\), got"):
        jaxcg.flax.nnx.Convolution("2x0e", "0e", 5, hidden=hidden, rngs=nnx.Rngs(0))
