"""The description: constructors, orders of weights and irreps, value semantics, errors, the table of paths."""

import pickle
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import e3nn_jax as e3nn
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcg import TensorProduct
from jaxcg._coupling import couple
from jaxcg._errors import InstructionError, IrrepsError, JaxcgError, OptionError
from jaxcg._explain import row_bytes, row_flops


def operands(tp: TensorProduct, seed: int = 0) -> list[jnp.ndarray]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=n)) for n in (tp.irreps_in1.dim, tp.irreps_in2.dim, tp.weight_numel)]


def one(*arguments: object, **options: Any) -> Callable[[], TensorProduct]:
    """A product of one instruction: three irreps, then the instruction."""
    return lambda: TensorProduct(*arguments[:3], [arguments[3:]], **options)


# name: irreps_in1, irreps_in2, filter, paths, weights, dim_out. Sizes as published for these models.
PRODUCTION = {
    "mace-large": ("128x0e+128x1o+128x2e", "0e+1o+2e+3o", "0e+1o+2e+3o", 17, 2176, 9088),
    "mace-medium": ("128x0e+128x1o", "0e+1o+2e+3o", "0e+1o+2e", 8, 1024, None),
    "mace-first": ("128x0e", "0e+1o+2e+3o", "0e+1o+2e+3o", 4, 512, None),
    "nequip-toluene": ("64x0o+64x0e+64x1o+64x1e+64x2o+64x2e", "0e+1o+2e", "0o+0e+1o+1e+2o+2e", 30, 1920, None),
    "nequip-benzene": (
        "64x0o+64x0e+64x1o+64x1e+64x2o+64x2e+64x3o+64x3e",
        "0e+1o+2e+3o",
        "0o+0e+1o+1e+2o+2e+3o+3e",
        68,
        4352,
        None,
    ),
    "sevennet-l3i5": ("128x0e+64x1e+32x2e+32x3e", "0e+1e+2e+3e", "0e+1e+2e+3e", 34, 1760, None),
}


@pytest.mark.parametrize("row", PRODUCTION.values(), ids=PRODUCTION)
def test_channelwise_has_the_published_size(row: tuple) -> None:
    in1, in2, keep, paths, weights, dim_out = row
    tp = TensorProduct.channelwise(in1, in2, filter_ir_out=keep)
    assert (len(tp.instructions), tp.weight_numel) == (paths, weights)
    assert dim_out is None or tp.irreps_out.dim == dim_out
    assert {ir for _, ir in tp.irreps_out} <= {ir for _, ir in e3nn.Irreps(keep)}
    assert sorted(i_out for _, _, i_out, *_ in tp.instructions) == list(range(paths))
    assert tp.kernel_support().ok


def slots(tp: TensorProduct) -> list[tuple[int, int, str]]:
    """(i_in1, i_in2, output irrep) in the order of the weights."""
    return [(i1, i2, str(tp.irreps_out[i_out].ir)) for i1, i2, i_out, *_ in tp.instructions]


def test_weight_order_path_is_the_loop_and_slot_the_order_of_the_output() -> None:
    arguments = ("2x0e+2x1o", "0e+1o", "0e+1o")
    by_path = TensorProduct.channelwise(*arguments, weight_order="path")
    by_slot = TensorProduct.channelwise(*arguments, weight_order="slot")
    # As NequIP: the loop over x, then y, then output irreps.
    assert slots(by_path) == [(0, 0, "0e"), (0, 1, "1o"), (1, 0, "1o"), (1, 1, "0e")]
    assert [i_out for _, _, i_out, *_ in by_path.instructions] == [0, 2, 3, 1]
    # As MACE: instructions sorted by their output slot.
    assert slots(by_slot) == [(0, 0, "0e"), (1, 1, "0e"), (0, 1, "1o"), (1, 0, "1o")]
    assert [i_out for _, _, i_out, *_ in by_slot.instructions] == [0, 1, 2, 3]
    assert by_path.irreps_out == by_slot.irreps_out == e3nn.Irreps("2x0e+2x0e+2x1o+2x1o")
    # The same function once the weights are permuted.
    x, y, w = operands(by_path)
    permuted = w.reshape(4, 2)[np.array([0, 3, 1, 2])].reshape(-1)
    np.testing.assert_allclose(by_path(x, y, w), by_slot(x, y, permuted), rtol=0, atol=1e-14)


def test_irrep_order_of_each_library() -> None:
    irreps = "2x1e+2x0o+2x2o+2x0e+2x1o+2x2e"
    jax_order = TensorProduct.channelwise(irreps, "0e")
    torch_order = TensorProduct.channelwise(irreps, "0e", irrep_order="torch")
    assert [str(ir) for _, ir in jax_order.irreps_out] == ["0e", "0o", "1o", "1e", "2e", "2o"]
    assert [str(ir) for _, ir in torch_order.irreps_out] == ["0o", "0e", "1o", "1e", "2o", "2e"]
    assert jax_order.irreps_out == e3nn.Irreps(irreps).sort().irreps
    # Weights in path order do not notice; in slot order they follow the slots.
    assert slots(jax_order) == slots(torch_order)
    by_slot = TensorProduct.channelwise(irreps, "0e", irrep_order="torch", weight_order="slot")
    assert [i_out for _, _, i_out, *_ in by_slot.instructions] == list(range(6))


KEEP = [None, "0e+1o", e3nn.Irrep("1o"), e3nn.Irreps("3x1o+2e"), ["0e", e3nn.Irrep("2e")]]
PAIRS = [("2x0e+1o+1x2e", "0e+3x1o"), ("1o+2x0e+0x1e+1o", "2x1o+0e"), ("", "1o"), ("0x1o", "2x0e")]


@pytest.mark.parametrize("keep", KEEP, ids=str)
@pytest.mark.parametrize("normalization", ["component", "norm", "none"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_full_equals_e3nn_before_regroup(pair: tuple[str, str], normalization: str, keep: object) -> None:
    tp = TensorProduct.full(*pair, keep, irrep_normalization=normalization)
    x, y, _ = operands(tp)
    expected = e3nn.tensor_product(
        e3nn.IrrepsArray(pair[0], x),
        e3nn.IrrepsArray(pair[1], y),
        filter_ir_out=keep,
        irrep_normalization=normalization,
        regroup_output=False,
    )
    assert tuple(tp.irreps_out) == tuple(expected.irreps)
    np.testing.assert_allclose(tp(x, y), expected.array, rtol=0, atol=1e-13)


@pytest.mark.parametrize("keep", [None, "0e+1o"], ids=str)
@pytest.mark.parametrize("pair", [("2x0e+1o", "1e+0o+0o"), ("3x1o", "3x1o"), ("4x1o+2e", "1e+3x2o+1x0e")], ids=str)
def test_elementwise_equals_e3nn(pair: tuple[str, str], keep: str | None) -> None:
    tp = TensorProduct.elementwise(*pair, keep)
    x, y, _ = operands(tp)
    first, second = (e3nn.IrrepsArray(irreps, a) for irreps, a in zip(pair, (x, y), strict=True))
    expected = e3nn.elementwise_tensor_product(first, second, filter_ir_out=keep)
    assert tp.irreps_out == expected.irreps
    np.testing.assert_allclose(tp(x, y), expected.array, rtol=0, atol=1e-13)


def test_fully_connected_has_the_weights_of_e3nn() -> None:
    from e3nn_jax.legacy import FunctionalFullyConnectedTensorProduct

    irreps = ("10x1o+10x1e+4x0e+4x0o", "0e+1o", "10x1o+10x1e+4x0e+4x0o")
    tp, theirs = TensorProduct.fully_connected(*irreps), FunctionalFullyConnectedTensorProduct(*irreps)
    assert [tp.weight_shape(n) for n in range(len(tp.instructions))] == [i.path_shape for i in theirs.instructions]
    assert tp.weight_numel == sum(np.prod(i.path_shape) for i in theirs.instructions)


def test_channelwise_leaves_out_empty_blocks() -> None:
    tp = TensorProduct.channelwise("0x1o+4x0e+0x2e", "0e+0x1o+1o")
    assert tp.irreps_out == e3nn.Irreps("4x0e+4x1o")
    assert tp.weight_numel == 8
    empty = TensorProduct.channelwise("", "0e")
    assert (empty.irreps_out.dim, empty.weight_numel, empty.instructions) == (0, 0, ())


def test_equality_is_meaning() -> None:
    def make(**options: Any) -> TensorProduct:
        return TensorProduct("4x0e", "0e", "4x0e", [(0, 0, 0, "uvu", True)], **options)

    tp = make()
    given = [e3nn.Irreps("4x0e"), e3nn.Irreps("0e"), e3nn.Irreps("4x0e"), ([0, 0, 0, "uvu", 1, 1],)]
    assert tp == TensorProduct(*given)
    assert hash(tp) == hash(TensorProduct(*given))
    assert tp.instructions == ((0, 0, 0, "uvu", True, 1.0),)
    assert make(path_normalization=0) == make(path_normalization="element")
    assert make(path_normalization=1.0) == make(path_normalization="path")
    others = [make(layout="ir_mul"), make(irrep_normalization="norm"), make(path_normalization=0.5)]
    others.append(TensorProduct("4x0e", "0e", "4x0e", [(0, 0, 0, "uvu", True, 2.0)]))
    assert len({tp, *others}) == 5
    for product in (tp, *others):
        again = pickle.loads(pickle.dumps(product))
        assert again == product
        assert hash(again) == hash(product)
        assert couple(again) == couple(product)
    with pytest.raises(FrozenInstanceError):
        tp.layout = "ir_mul"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("case", [("5x1o", "1o", "uvu"), ("1o", "5x1o", "uvv"), ("2x1o", "5x1o", "uvv")], ids=str)
def test_layouts_give_the_same_numbers(case: tuple[str, str, str]) -> None:
    irreps1, irreps2, mode = case
    products = [one(irreps1, irreps2, "5x1e", 0, 0, 0, mode, True, layout=layout)() for layout in ("mul_ir", "ir_mul")]
    x, y, w = operands(products[0])
    mul1 = e3nn.Irreps(irreps1).num_irreps
    z = products[0](x, y, w).reshape(5, 3)
    # x and z are transposed within their blocks, y is not.
    transposed = products[1](x.reshape(mul1, 3).T.reshape(-1), y, w).reshape(3, 5).T
    np.testing.assert_allclose(transposed, z, rtol=0, atol=1e-14)


def test_e3nn_configuration_is_read_once_at_construction() -> None:
    try:
        e3nn.config("irrep_normalization", "norm")
        e3nn.config("path_normalization", "path")
        tp = TensorProduct.channelwise("4x1o", "1o")
    finally:
        e3nn.config("irrep_normalization", "component")
        e3nn.config("path_normalization", "element")
    assert (tp.irrep_normalization, tp.path_normalization) == ("norm", "path")
    assert tp == TensorProduct.channelwise("4x1o", "1o", irrep_normalization="norm", path_normalization="path")


channelwise = TensorProduct.channelwise
ERRORS = {
    "irreps": (IrrepsError, "irreps_in2.*'1q'", lambda: channelwise("4x0e", "1q")),
    "filter": (IrrepsError, "filter_ir_out", lambda: channelwise("4x0e", "0e", ["1q"])),
    "channels": (IrrepsError, "irreps_in2.*2.*got 3", lambda: TensorProduct.elementwise("2x0e", "3x0e")),
    "layout": (OptionError, "layout.*'mul_ir', 'ir_mul', got 'x'", lambda: channelwise("0e", "0e", layout="x")),
    "weight_order": (OptionError, "weight_order.*'path', 'slot'", lambda: channelwise("0e", "0e", weight_order="x")),
    "irrep_order": (OptionError, "irrep_order.*'jax', 'torch'", lambda: channelwise("0e", "0e", irrep_order="x")),
    "irreps_norm": (OptionError, "irrep_normalization", lambda: channelwise("0e", "0e", irrep_normalization="x")),
    "path_norm": (OptionError, "path_normalization", lambda: channelwise("0e", "0e", path_normalization=2.0)),
    "length": (InstructionError, r"instructions\[0\].*has_weight", one("0e", "0e", "0e", 0, 0, 0)),
    "index": (InstructionError, r"\[0\]\.i_in2.*\[0, 1\).*got 1", one("0e", "0e", "0e", 0, 1, 0, "uvu", True)),
    "negative": (InstructionError, r"instructions\[0\]\.i_out", one("0e", "0e", "0e", 0, 0, -1, "uvu", True)),
    "mode": (InstructionError, "uvw, uvu.*'vuv'", one("0e", "0e", "0e", 0, 0, 0, "vuv", True)),
    "selection": (InstructionError, "0e x 1o = 1o.*got 1e", one("0e", "1o", "1e", 0, 0, 0, "uvu", True)),
    "uvu": (InstructionError, "mul1 for mode uvu.*3, 1 -> 2", one("3x0e", "0e", "2x0e", 0, 0, 0, "uvu", True)),
    "uvuv": (InstructionError, r"mul1 \* mul2 for mode", one("3x0e", "2x0e", "3x0e", 0, 0, 0, "uvuv", True)),
    "uvw": (InstructionError, "has_weight=True for.*uvuv", one("3x0e", "0e", "3x0e", 0, 0, 0, "uvw", False)),
    "uuw": (InstructionError, "multiplicity 1 of the out", one("3x0e", "3x0e", "3x0e", 0, 0, 0, "uuw", False)),
    "weight": (InstructionError, "path_weight.*>= 0.*-1", one("0e", "0e", "0e", 0, 0, 0, "uvu", True, -1.0)),
}


@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS)
def test_errors_name_argument_expected_and_received(case: tuple) -> None:
    kind, match, make = case
    with pytest.raises(kind, match=match) as caught:
        make()
    assert isinstance(caught.value, JaxcgError)
    assert isinstance(caught.value, ValueError)


UVV = ("5x1o", "5x0e", 0, 0, 0, "uvv", True)
SUPPORT = {
    "uvu": (channelwise("5x0e+3x1o", "0e+1o"), True, False, "uvu with multiplicity 1"),
    "unweighted": (one("5x1o", "1o", "5x0e", 0, 0, 0, "uvu", False)(), True, False, "uvu"),
    "empty-block": (one("5x1o+0x0e", "1o+0x0e", "5x0e", 0, 0, 0, "uvu", True)(), True, False, "uvu"),
    "nothing": (one("0x1o", "2x0e", "0x1o", 0, 0, 0, "uvw", True)(), True, False, "zero"),
    "uvv": (one("1o", *UVV)(), True, True, "plain product only"),
    "uvv-ir_mul": (one("1o", *UVV, layout="ir_mul")(), True, True, "plain product only"),
    "uvv-mul1": (one("2x1o", *UVV)(), False, False, "multiplicity 2 in the first"),
    "mul2": (channelwise("5x0e", "0e+2x1o"), False, False, r"1 \(mode uvu\) has multiplicity 2 in the second"),
    "uvw": (TensorProduct.fully_connected("2x1o", "1o", "5x0e"), False, False, "instruction 0 has mode uvw"),
    "uvuv": (TensorProduct.full("2x1o", "1o"), False, False, "mode uvuv"),
    "uuu": (TensorProduct.elementwise("2x1o", "2x1o"), False, False, "mode uuu"),
    "mixed": (
        TensorProduct("1o", "1o", "0e", [(0, 0, 0, "uvu", True), (0, 0, 0, "uvv", True)]),
        False,
        False,
        "mix",
    ),
}


@pytest.mark.parametrize("case", SUPPORT.values(), ids=SUPPORT)
def test_kernel_support_says_why(case: tuple) -> None:
    tp, ok, swapped, reason = case
    support = tp.kernel_support()
    assert (support.ok, support.swapped) == (ok, swapped)
    assert re.search(reason, support.reason), support.reason
    assert support.reason in tp.explain()


def test_explain_lists_every_path_and_what_a_row_costs() -> None:
    tp = TensorProduct(
        "4x0e+0x1o+4x1o",
        "0e+1o",
        "4x0e+4x1o",
        [(0, 0, 0, "uvu", True), (2, 1, 0, "uvu", False), (2, 0, 1, "uvw", True)],
    )
    text = tp.explain()
    assert "3 paths, 20 weights" in text
    lines = text.splitlines()
    assert lines[2].split() == ["0", "4x0e", "1x0e", "4x0e", "uvu", "1", "4", "xla"]
    assert lines[3].split() == ["1", "4x1o", "1x1o", "4x0e", "uvu", "3", "0", "xla"]
    assert lines[4].split() == ["2", "4x1o", "1x0e", "4x1o", "uvw", "3", "16", "xla", "(mode", "uvw)"]
    # 4 channels x (1 + 3 + 3) nonzeros, then 4 x 1 and 16 x 3 products with weights; multiply and add.
    assert row_flops(tp) == 2 * (4 * 7 + 4 + 48)
    numbers = tp.irreps_in1.dim + tp.irreps_in2.dim + tp.weight_numel + tp.irreps_out.dim
    assert row_bytes(tp, 4) == 4 * numbers
    assert f"{row_flops(tp)} floating-point operations, at least {4 * numbers} bytes in float32" in text
    assert f"{8 * numbers} in float64" in text


def test_explain_says_what_a_kernel_runs_and_what_nothing_runs() -> None:
    text = TensorProduct.channelwise("8x0e+8x1o", "0e+1o").explain()
    assert sum(line.endswith("cuda kernel") for line in text.splitlines()) == 6
    swapped = TensorProduct("1o", "5x1o", "5x0e", [(0, 0, 0, "uvv", True)]).explain()
    assert "cuda kernel (plain product only)" in swapped
    empty = TensorProduct.full("8x0e+0x1o", "0e").explain()
    assert "nothing: multiplicity 0" in empty


def test_explain_says_how_kernels_are_laid_out_and_what_they_should_take() -> None:
    text = TensorProduct.channelwise("64x0e+64x1o", "0e+1o", "0e+1o").explain()
    lines = text[text.index("kernels of the convolution") :].splitlines()[1:]
    for order in ("forward", "backward", "double backward"):
        times = {}
        for dtype in ("float32", "float64"):
            (line,) = [line for line in lines if line.startswith(f"{dtype} {order}: ")]
            found = re.fullmatch(rf"{dtype} {order}: (.+) ns, floor (.+) ns \((\d+) %\), (\d+) launch(es)?", line)
            assert found is not None, line
            time, floor, share, launches = map(float, found.groups()[:4])
            assert 0 < floor < time and share == pytest.approx(100 * floor / time, abs=4)
            # One line a launch follows, and their times add up.
            start = lines.index(line) + 1
            parts = lines[start : start + int(launches)]
            assert all(
                re.search(r"limited by (memory|instructions): \d+ warps of \d+ registers", part) for part in parts
            )
            assert sum(float(part.split()[0]) for part in parts) == pytest.approx(time, abs=0.01 * len(parts))
            times[dtype] = time
        assert times["float64"] > times["float32"]
    assert "kernels of the convolution" not in TensorProduct.full("8x0e", "2x0e").explain()
