"""Coefficients: every path up to degree 4, every mode and both normalisations, against e3nn-jax in float64."""

import itertools
import time

import e3nn_jax as e3nn
import jax.numpy as jnp
import numpy as np
import pytest
from e3nn_jax.legacy import FunctionalTensorProduct

from jaxcg import TensorProduct
from jaxcg._coupling import Coupling, Path, clebsch_gordan, couple

DEGREES = [(a, b, c) for a, b in itertools.product(range(5), repeat=2) for c in range(abs(a - b), min(a + b, 4) + 1)]

# irreps_in1, irreps_in2, irreps_out, instructions: every mode, with and without weights, paths sharing a block.
MODES = {
    "uvw": (
        ("5x0e+3x1o", "2x0e+2x1o", "4x0e+2x1o"),
        ["0,0,0 uvw w", "1,1,0 uvw w 2.0", "1,0,1 uvw w"],
    ),
    "uvu": (
        ("3x1o+3x1e", "2x1o+1x2e", "3x1e+3x0e"),
        ["0,0,0 uvu w", "0,0,0 uvu - 0.3", "1,1,0 uvu w", "0,0,1 uvu w"],
    ),
    "uvv": (
        ("3x1o+1x0e", "2x1o+4x2e", "2x1e+4x2e"),
        ["0,0,0 uvv w", "1,1,1 uvv -", "0,0,0 uvv -"],
    ),
    "uuw": (
        ("3x1o", "3x2e", "1x1o+4x3o"),
        ["0,0,0 uuw -", "0,0,1 uuw w", "0,0,0 uuw w"],
    ),
    "uuu": (
        ("3x1o+2x0o", "3x1o+2x0o", "3x1e+2x0e"),
        ["0,0,0 uuu w", "1,1,1 uuu - 3.0"],
    ),
    "uvuv": (
        ("3x1o+2x0o", "2x1o+1x2e", "6x2e+3x3o+6x2e"),
        ["0,0,0 uvuv w", "0,1,1 uvuv -", "0,0,2 uvuv -"],
    ),
    "mixed": (
        ("2x1o+2x1e", "1x0e+2x1o", "2x1o+4x1e+2x0e"),
        ["0,0,0 uvu w", "0,1,1 uvuv -", "0,1,2 uvw w", "1,1,0 uuu w", "1,1,0 uvv w"],
    ),
}


def instruction(text: str) -> tuple:
    """Read ``i_in1,i_in2,i_out mode w|- [path_weight]``."""
    blocks, mode, weighted, *path_weight = text.split()
    return (*map(int, blocks.split(",")), mode, weighted == "w", *map(float, path_weight))


MODES = {name: (*irreps, [instruction(line) for line in lines]) for name, (irreps, lines) in MODES.items()}


def dense(path: Path) -> np.ndarray:
    """The coefficients of a path as an array ``[2 l1 + 1, 2 l2 + 1, 2 l3 + 1]``."""
    c = np.zeros((2 * path.l1 + 1, 2 * path.l2 + 1, 2 * path.l3 + 1))
    for i, j, k, value in path.entries:
        c[i, j, k] = value
    return c


def evaluate(coupling: Coupling, x: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    """One row of a product in mul_ir layout, written as plainly as the definition."""
    z = np.zeros(coupling.dim_out)
    for path in coupling.paths:
        first = x[path.in1_offset :][: path.mul1 * (2 * path.l1 + 1)].reshape(path.mul1, -1)
        second = y[path.in2_offset :][: path.mul2 * (2 * path.l2 + 1)].reshape(path.mul2, -1)
        tied = path.mode in ("uuw", "uuu")
        pairs = np.einsum("ijk,ui,vj->uvk", dense(path), first, second)
        if tied:
            pairs = np.einsum("uuk->uk", pairs)
        spec = {"uvw": "uvw,uvk->wk", "uvu": "uv,uvk->uk", "uvv": "uv,uvk->vk", "uvuv": "uv,uvk->uvk"}
        spec |= {"uuw": "uw,uk->wk", "uuu": "u,uk->uk"}
        if path.weight_offset is None:
            shape = {"uuw": (path.mul1, 1), "uuu": (path.mul1,)}.get(path.mode, (path.mul1, path.mul2))
            weights = np.ones(shape)
        else:
            weights = w[path.weight_offset :][: int(np.prod(path.weight_shape))].reshape(path.weight_shape)
        part = np.einsum(spec[path.mode], weights, pairs).reshape(-1)
        z[path.out_offset :][: part.size] += part
    return z


def operands(tp: TensorProduct, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=n) for n in (tp.irreps_in1.dim, tp.irreps_in2.dim, tp.weight_numel)]


def reference(case: tuple, x: np.ndarray, y: np.ndarray, w: np.ndarray, **options: object) -> np.ndarray:
    theirs = FunctionalTensorProduct(*case, gradient_normalization="path", **options)
    first, second = e3nn.IrrepsArray(case[0], jnp.asarray(x)), e3nn.IrrepsArray(case[1], jnp.asarray(y))
    return np.asarray(theirs.left_right(jnp.asarray(w), first, second).array)


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("parities", [(1, 1), (1, -1), (-1, 1), (-1, -1)], ids=str)
def test_every_path_equals_e3nn(degrees: tuple[int, int, int], parities: tuple[int, int]) -> None:
    (l1, l2, l3), (p1, p2) = degrees, parities
    irreps = [e3nn.Irreps([(1, (degree, p))]) for degree, p in zip(degrees, (p1, p2, p1 * p2), strict=True)]
    (path,) = couple(TensorProduct(*irreps, [(0, 0, 0, "uvu", True)], irrep_normalization="component")).paths
    expected = np.asarray(e3nn.clebsch_gordan(l1, l2, l3)) * np.sqrt(2 * l3 + 1)
    np.testing.assert_allclose(dense(path), expected, rtol=0, atol=1e-14)
    # Nothing but the nonzeros, sorted.
    assert len(path.entries) == np.count_nonzero(np.abs(expected) > 1e-12)
    assert list(path.entries) == sorted(path.entries)


@pytest.mark.parametrize("degrees", [(5, 5, 5), (6, 6, 6), (6, 4, 3), (2, 6, 5)], ids=str)
def test_higher_degrees_equal_e3nn(degrees: tuple[int, int, int]) -> None:
    ours = np.zeros([2 * degree + 1 for degree in degrees])
    for i, j, k, sign, square in clebsch_gordan(*degrees):
        ours[i, j, k] = sign * float(square) ** 0.5
    np.testing.assert_allclose(ours, np.asarray(e3nn.clebsch_gordan(*degrees)), rtol=0, atol=1e-13)


# (6, 6, 12): past the accuracy of the reference, whose float sums lose three digits there; ours are exact.
@pytest.mark.parametrize("degrees", [*DEGREES, (6, 6, 6), (6, 6, 12)], ids=str)
def test_coefficients_are_orthonormal(degrees: tuple[int, int, int]) -> None:
    # Rows of C for two components of l3 are orthogonal: an error in any single coefficient breaks this.
    l3 = degrees[2]
    gram = np.zeros((2 * l3 + 1, 2 * l3 + 1))
    table: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for i, j, k, sign, square in clebsch_gordan(*degrees):
        table.setdefault((i, j), []).append((k, sign * float(square) ** 0.5))
    for row in table.values():
        for (k, a), (m, b) in itertools.product(row, repeat=2):
            gram[k, m] += a * b
    np.testing.assert_allclose(gram * (2 * l3 + 1), np.eye(2 * l3 + 1), rtol=0, atol=1e-14)


@pytest.mark.parametrize("irrep_normalization", ["component", "norm", "none"])
@pytest.mark.parametrize("path_normalization", ["element", "path", 0.3], ids=str)
@pytest.mark.parametrize("case", MODES.values(), ids=MODES)
def test_every_mode_equals_e3nn(case: tuple, path_normalization: str | float, irrep_normalization: str) -> None:
    options = {"irrep_normalization": irrep_normalization, "path_normalization": path_normalization}
    tp = TensorProduct(*case, **options)
    x, y, w = operands(tp)
    expected = reference(case, x, y, w, **options)
    np.testing.assert_allclose(evaluate(couple(tp), x, y, w), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("path_normalization", ["element", "path", 0.3], ids=str)
def test_zero_multiplicities_equal_the_list_without_them(path_normalization: str | float) -> None:
    # Blocks 1 of each irreps are empty; every mode meets one of them.
    instructions = [
        (0, 0, 0, "uvw", True),
        (1, 0, 0, "uvw", True),
        (0, 1, 0, "uvw", True),
        (0, 0, 1, "uvw", True),
        (2, 0, 2, "uvu", True),
        (2, 1, 2, "uvu", True),
        (0, 1, 1, "uvv", False),
        (1, 1, 1, "uuu", True),
        (1, 1, 0, "uuw", True),
        (1, 0, 1, "uvuv", False),
    ]
    with_empty = TensorProduct(
        "3x0e+0x0e+2x1o", "2x0e+0x0e", "4x0e+0x0e+2x1o", instructions, path_normalization=path_normalization
    )
    case = ("3x0e+2x1o", "2x0e", "4x0e+2x1o", [(0, 0, 0, "uvw", True), (1, 0, 1, "uvu", True)])
    x, y, w = operands(with_empty)
    expected = reference(case, x, y, w, path_normalization=path_normalization)
    assert with_empty.weight_numel == w.size == 3 * 2 * 4 + 2 * 2
    np.testing.assert_allclose(evaluate(couple(with_empty), x, y, w), expected, rtol=0, atol=1e-13)
    assert [path.index for path in couple(with_empty).paths] == [0, 4]


def test_a_path_of_weight_zero_is_left_out_and_keeps_its_weights() -> None:
    case = ("2x0e", "0e+0e", "2x0e", [(0, 0, 0, "uvu", True, 0.0), (0, 1, 0, "uvu", True)])
    tp = TensorProduct(*case)
    assert tp.weight_numel == 4
    (path,) = couple(tp).paths
    assert (path.index, path.weight_offset) == (1, 2)
    x, y, w = operands(tp)
    np.testing.assert_allclose(evaluate(couple(tp), x, y, w), reference(case, x, y, w), rtol=0, atol=1e-14)


@pytest.mark.parametrize("case", MODES.values(), ids=MODES)
def test_expanded_slots_are_private_and_sum_to_the_product(case: tuple) -> None:
    tp = TensorProduct(*case)
    plain, private = couple(tp), couple(tp, expanded=True)
    sizes = [path.mul_out * (2 * path.l3 + 1) for path in private.paths]
    assert [path.out_offset for path in private.paths] == np.cumsum([0, *sizes])[:-1].tolist()
    assert private.dim_out == sum(sizes)
    x, y, w = operands(tp)
    slots, z = evaluate(private, x, y, w), np.zeros(plain.dim_out)
    for path, slot, size in zip(plain.paths, private.paths, sizes, strict=True):
        z[path.out_offset :][:size] += slots[slot.out_offset :][:size]
    np.testing.assert_allclose(z, evaluate(plain, x, y, w), rtol=0, atol=1e-13)


def test_swapped_is_the_same_product_with_operands_exchanged() -> None:
    case = (
        "1o+2e",
        "4x0e+4x1o",
        "4x1o+4x2e",
        [(0, 0, 0, "uvv", True), (0, 1, 1, "uvv", False, 2.0), (1, 1, 0, "uvv", True)],
    )
    tp = TensorProduct(*case)
    swapped = couple(tp, swapped=True)
    assert {(path.mode, path.mul2) for path in swapped.paths} == {("uvu", 1)}
    x, y, w = operands(tp)
    np.testing.assert_allclose(evaluate(swapped, y, x, w), reference(case, x, y, w), rtol=0, atol=1e-13)


def test_entries_equal_up_to_sign_are_so_to_the_last_bit() -> None:
    # The code generator shares products of such entries; two sizes a rounding apart would be a product lost.
    (path,) = couple(TensorProduct("2e", "3o", "3o", [(0, 0, 0, "uvu", True)])).paths
    sizes = sorted({abs(value) for *_, value in path.entries})
    assert all(b - a > 1e-6 for a, b in itertools.pairwise(sizes))
    (scalar,) = couple(TensorProduct("2e", "0e", "2e", [(0, 0, 0, "uvu", True)])).paths
    assert {value for *_, value in scalar.entries} == {1.0}


def test_a_large_product_couples_quickly() -> None:
    irreps = "64x0o+64x0e+64x1o+64x1e+64x2o+64x2e+64x3o+64x3e"
    clebsch_gordan.cache_clear()
    couple.cache_clear()
    start = time.perf_counter()
    coupling = couple(TensorProduct.channelwise(irreps, "0e+1o+2e+3o", filter_ir_out=irreps))
    assert time.perf_counter() - start < 1.0
    assert len(coupling.paths) == 68
