"""Every wrong use raises when the call is traced: an error that names the argument, what was expected, what came."""

import pickle
from collections.abc import Callable
from typing import Any

import e3nn_jax as e3nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcg
from tests import emulator

TP = jaxcg.TensorProduct.channelwise("3x0e+2x1o", "0e+1o", "0e+1o")
X, Y, W = jnp.ones((4, 9), "float32"), jnp.ones((6, 4), "float32"), jnp.ones((6, 10), "float32")
INDEX = jnp.zeros(6, "int32")
ARGUMENTS = {"x": X, "y": Y, "w": W, "senders": INDEX, "receivers": INDEX, "num_nodes": 4}


def convolve(**changed: Any) -> jax.Array:
    return TP.convolve(**(ARGUMENTS | changed))


def lower(dtype: str) -> dict[str, jax.Array]:
    return {"x": X.astype(dtype), "y": Y.astype(dtype), "w": W.astype(dtype)}


# name: changed arguments, error, what its text holds: argument, expected, received.
CONVOLVE: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "x-irreps": ({"x": X[:, :8]}, jaxcg.ShapeError, ["`x`", "last axis 9", "irreps_in1 = 3x0e+2x1o", "[4, 8]"]),
    "y-irreps": ({"y": jnp.ones((6, 5))}, jaxcg.ShapeError, ["`y`", "last axis 4", "irreps_in2 = 1x0e+1x1o", "[6, 5]"]),
    "x-and-y-swapped": ({"x": Y, "y": X}, jaxcg.ShapeError, ["`x`", "last axis 9", "[6, 4]"]),
    "w-length": ({"w": W[:, :7]}, jaxcg.ShapeError, ["`w`", "last axis 10", "tp.weight_numel", "[6, 7]"]),
    "w-shared-length": ({"w": W[0, :7]}, jaxcg.ShapeError, ["`w`", "last axis 10", "[7]"]),
    "w-missing": ({"w": None}, jaxcg.ShapeError, ["`w`", "[..., 10] or [10]", "None", "4 of the 4 paths"]),
    "w-rows": ({"w": W[:5]}, jaxcg.ShapeError, ["`w`", "[6, 10]", "[10] (shared)", "[5, 10]"]),
    "w-axes": ({"w": W[None]}, jaxcg.ShapeError, ["`w`", "[6, 10]", "[1, 6, 10]"]),
    "y-rows": ({"y": Y[:5]}, jaxcg.ShapeError, ["`y`", "one row for each edge", "[6, 4]", "[5, 4]"]),
    "y-one-row": ({"y": Y[0]}, jaxcg.ShapeError, ["`y`", "[6, 4]", "[4]"]),
    "x-axes": ({"x": X[None]}, jaxcg.ShapeError, ["`x`", "[num_nodes, 9]", "[1, 4, 9]", "vmap"]),
    "x-one-row": ({"x": X[0]}, jaxcg.ShapeError, ["`x`", "[num_nodes, 9]", "[9]"]),
    "x-scalar": ({"x": 1.0}, jaxcg.ShapeError, ["`x`", "last axis 9", "[]"]),
    "bfloat16": (lower("bfloat16"), jaxcg.DtypeError, ["float32 or float64", "`x` bfloat16", "cast them to float32"]),
    "float16": (lower("float16"), jaxcg.DtypeError, ["float32 or float64", "`w` float16", "cast them to float32"]),
    "complex": ({"y": Y + 0j}, jaxcg.DtypeError, ["float32 or float64", "`y` complex64"]),
    "x-text": ({"x": "x"}, jaxcg.DtypeError, ["`x`", "an array of numbers", "str"]),
    "y-none": ({"y": None}, jaxcg.DtypeError, ["`y`", "an array of numbers", "NoneType"]),
    "x-irreps-array": (
        {"x": e3nn.IrrepsArray("3x0e+2x1o", X)}, jaxcg.DtypeError, ["`x`", "IrrepsArray", ".array", "jaxcg.e3nn"],
    ),
    "too-many-nodes": ({"num_nodes": 2**31}, jaxcg.GraphError, ["`num_nodes`", "at most 2147483647", "2147483648"]),
    "list-of-edges-ordered": (
        {"edge_order": jaxcg.EdgeOrder([5, 4])}, jaxcg.GraphError, ["`edge_order`", "6 integers", "[2]"],  # type: ignore
    ),
    "lengths": ({"senders": INDEX[:5]}, jaxcg.GraphError, ["`senders`", "`receivers`", "5 senders", "6 receivers"]),
    "no-senders": ({"senders": None}, jaxcg.GraphError, ["`senders`", "integer array of shape [num_edges]", "None"]),
    "no-receivers": ({"receivers": None}, jaxcg.GraphError, ["`receivers`", "[num_edges]", "None"]),
    "float-senders": ({"senders": INDEX * 1.0}, jaxcg.DtypeError, ["`senders`", "int32 or int64", "float"]),
    "bool-receivers": ({"receivers": INDEX > 0}, jaxcg.DtypeError, ["`receivers`", "int32 or int64", "bool"]),
    "list-of-senders": ({"senders": [0] * 6}, jaxcg.DtypeError, ["`senders`", "array of integers", "list"]),
    "text-senders": ({"senders": np.array(["a"] * 6)}, jaxcg.DtypeError, ["`senders`", "array of integers", "<U1"]),
    "edge-index": ({"senders": INDEX[None]}, jaxcg.ShapeError, ["`senders`", "[num_edges]", "[1, 6]"]),
    "one-sender": ({"senders": jnp.int32(0)}, jaxcg.ShapeError, ["`senders`", "[num_edges]", "[]"]),
    "num-nodes-float": ({"num_nodes": 4.0}, jaxcg.GraphError, ["`num_nodes`", "non-negative Python integer", "4.0"]),
    "num-nodes-negative": ({"num_nodes": -1}, jaxcg.GraphError, ["`num_nodes`", "non-negative", "-1"]),
    "num-nodes-bool": ({"num_nodes": True}, jaxcg.GraphError, ["`num_nodes`", "integer", "True"]),
    "num-nodes-none": ({"num_nodes": None}, jaxcg.GraphError, ["`num_nodes`", "integer", "None"]),
    "num-nodes-array": ({"num_nodes": INDEX[0]}, jaxcg.GraphError, ["`num_nodes`", "known at trace time", "Array"]),
    "order-of-another-type": ({"edge_order": INDEX}, jaxcg.GraphError, ["`edge_order`", "jaxcg.sort_edges", "Array"]),
    "order-of-fewer-edges": (
        {"edge_order": jaxcg.sort_edges(INDEX[:5], INDEX[:5], 4)}, jaxcg.GraphError, ["`edge_order`", "6", "[5]"],
    ),
    "order-of-floats": (
        {"edge_order": jaxcg.EdgeOrder(INDEX * 1.0)}, jaxcg.GraphError, ["`edge_order`", "6 integers", "float"],
    ),
    "sorted-text": ({"receivers_sorted": "yes"}, jaxcg.OptionError, ["`receivers_sorted`", "True or False", "'yes'"]),
    "sorted-array": ({"receivers_sorted": INDEX[0] == 0}, jaxcg.OptionError, ["`receivers_sorted`", "Array(True"]),
    "impl": ({"impl": "gpu"}, jaxcg.OptionError, ["`impl`", "'auto', 'cuda', 'xla'", "'gpu'"]),
    "cuda-on-cpu": ({"impl": "cuda"}, jaxcg.UnsupportedError, ["impl='cuda'", "CUDA device", "cpu", "impl='auto'"]),
}  # fmt: skip


def assert_raises(call: Callable[[], object], error: type[Exception], parts: list[str]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, jaxcg.JaxcgError) and isinstance(caught.value, ValueError)
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"


@pytest.mark.parametrize("name", CONVOLVE)
def test_convolve(name: str) -> None:
    changed, error, parts = CONVOLVE[name]
    assert_raises(lambda: convolve(**changed), error, parts)
    if name != "cuda-on-cpu":  # The platform is known when the program is compiled.
        assert_raises(lambda: jax.make_jaxpr(lambda: convolve(**changed))(), error, parts)


def test_a_number_of_nodes_that_is_traced() -> None:
    assert_raises(
        lambda: jax.jit(lambda n: convolve(num_nodes=n))(4), jaxcg.GraphError, ["`num_nodes`", "known at trace time"]
    )
    assert convolve(num_nodes=np.int64(4)).shape == (4, TP.irreps_out.dim)


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [
        ((X, jnp.ones((6, 4)), W), jaxcg.ShapeError, ["broadcast", "`x` [4]", "`y` [6]", "`w` [6]"]),
        ((X[:1], Y, W[:5]), jaxcg.ShapeError, ["broadcast", "`y` [6]", "`w` [5]"]),
        ((X[:, :8], Y[0], W[0]), jaxcg.ShapeError, ["`x`", "last axis 9", "3x0e+2x1o", "[4, 8]"]),
        ((X, Y[0]), jaxcg.ShapeError, ["`w`", "got None"]),
        ((None, Y, W), jaxcg.DtypeError, ["`x`", "an array of numbers", "NoneType"]),
        (tuple(lower("bfloat16").values()), jaxcg.DtypeError, ["float32", "`x` bfloat16"]),
    ],
    ids=["leading-axes", "rows-of-w", "irreps", "no-w", "none", "bfloat16"],
)
def test_product(arguments: tuple, error: type[Exception], parts: list[str]) -> None:
    assert_raises(lambda: TP(*arguments), error, parts)
    assert_raises(lambda: jax.make_jaxpr(lambda: TP(*arguments))(), error, parts)


def test_weights_of_a_product_that_has_none() -> None:
    tp = jaxcg.TensorProduct.full("2x0e", "0e")
    x, y = jnp.ones((3, 2)), jnp.ones((3, 1))
    assert_raises(lambda: tp(x, y, jnp.ones(2)), jaxcg.ShapeError, ["`w`", "None", "[2]"])
    np.testing.assert_array_equal(tp(x, y, jnp.zeros((3, 0))), tp(x, y))


# What generated kernels cannot run, and the words of the reason.
UNSUPPORTED = {
    "uvw": (jaxcg.TensorProduct.fully_connected("2x0e", "0e", "2x0e"), "mode uvw"),
    "uvuv": (jaxcg.TensorProduct.full("2x0e", "0e"), "mode uvuv"),
    "uuu": (jaxcg.TensorProduct.elementwise("2x0e", "2x0e"), "mode uuu"),
    "uuw": (jaxcg.TensorProduct("2x0e", "2x0e", "3x0e", [(0, 0, 0, "uuw", True)]), "mode uuw"),
    "mul2": (jaxcg.TensorProduct.channelwise("2x0e", "3x0e"), "(mode uvu) has multiplicity 3 in the second operand"),
    "uvv-mul1": (
        jaxcg.TensorProduct("2x0e", "3x0e", "3x0e", [(0, 0, 0, "uvv", True)]), "(mode uvv) has multiplicity 2",
    ),
}  # fmt: skip


def ones(tp: jaxcg.TensorProduct, rows: int = 6) -> list[jax.Array]:
    dims = [tp.irreps_in1.dim, tp.irreps_in2.dim, *([tp.weight_numel] if tp.weight_numel else [])]
    return [jnp.ones((rows, dim)) for dim in dims]


@pytest.mark.parametrize(("tp", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_cuda_for_a_product_without_kernels_names_the_mode(tp: jaxcg.TensorProduct, reason: str) -> None:
    x, y, w = (*ones(tp), None)[:3]
    parts = ["impl='cuda'", "instruction 0", reason, "impl='auto'"]
    assert_raises(lambda: tp(x, y, w, impl="cuda"), jaxcg.UnsupportedError, parts)
    assert_raises(lambda: tp.convolve(x, y, w, INDEX, INDEX, num_nodes=4, impl="cuda"), jaxcg.UnsupportedError, parts)
    assert_raises(lambda: jaxcg.path_taken(tp, impl="cuda"), jaxcg.UnsupportedError, parts)
    # The other paths run it; on a GPU "auto" falls back to the same, and says so in the table.
    np.testing.assert_array_equal(tp(x, y, w, impl="auto"), tp(x, y, w, impl="xla"))
    assert jaxcg.path_taken(tp, platform="cuda") == "xla"
    assert reason in tp.kernel_support().reason


def test_auto_logs_once_that_it_takes_the_slow_path(caplog: pytest.LogCaptureFixture) -> None:
    tp = jaxcg.TensorProduct.fully_connected("2x0e+1o", "0e", "5x0e")
    call = jax.jit(lambda *v: tp(*v))
    with emulator.emulated(lambda text: b"never built"), caplog.at_level("INFO", logger="jaxcg"):
        for rows in (2, 3):
            assert "jaxcg_launch" not in call.lower(*ones(tp, rows)).as_text()
        (record,) = (record for record in caplog.records if record.name == "jaxcg")
        assert "2x0e+1x1o x 1x0e" in record.getMessage() and "mode uvw" in record.getMessage()


def test_cuda_for_a_convolution_of_mode_uvv() -> None:
    tp = jaxcg.TensorProduct("0e", "2x0e", "2x0e", [(0, 0, 0, "uvv", True)])
    x, y, w = ones(tp)
    assert_raises(
        lambda: tp.convolve(x, y, w, INDEX, INDEX, num_nodes=4, impl="cuda"),
        jaxcg.UnsupportedError, ["impl='cuda'", "convolution", "uvv", "impl='auto'"],
    )  # fmt: skip
    assert jaxcg.path_taken(tp, platform="cuda") == "xla"
    assert jaxcg.path_taken(tp, convolution=False, platform="cuda") == "cuda"


def test_sort_edges() -> None:
    for arguments, error, parts in (
        ((INDEX * 1.0, INDEX, 4), jaxcg.DtypeError, ["`senders`", "integers", "float"]),
        ((INDEX[:3], INDEX, 4), jaxcg.GraphError, ["3 senders", "6 receivers"]),
        ((INDEX, INDEX, 4.0), jaxcg.GraphError, ["`num_nodes`", "4.0"]),
        ((INDEX, INDEX, -1), jaxcg.GraphError, ["`num_nodes`", "-1"]),
        ((INDEX[None], INDEX[None], 4), jaxcg.ShapeError, ["`senders`", "[1, 6]"]),
    ):
        assert_raises(lambda a=arguments: jaxcg.sort_edges(*a), error, parts)


def test_errors_survive_pickling() -> None:
    # A worker process hands its error to the caller's.
    with pytest.raises(jaxcg.ShapeError) as caught:
        convolve(x=X[:, :8])
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is jaxcg.ShapeError and str(again) == str(caught.value)
