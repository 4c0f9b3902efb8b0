"""The XLA path, elementwise against e3nn-jax: modes, weights, layouts, empty blocks; its loop; its memory."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import e3nn_jax as e3nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcg
from jaxcg import _reference
from tests._oracle import Problem, assert_close, assert_nonzero, quick_compilation


@pytest.fixture(scope="module", autouse=True)
def compile_quickly() -> Iterator[None]:
    with quick_compilation():
        yield


# irreps_in1, irreps_in2, irreps_out, instructions: every mode with and without weights, multiplicities 1, 2 and 5 of
# the second operand, paths that share an output block.
MODES: dict[str, tuple[str, str, str, list[tuple]]] = {
    "uvw": ("3x0e+2x1o", "1x0e+2x1o+5x2e", "2x0e+3x1o", [
        (0, 0, 0, "uvw", True), (1, 1, 0, "uvw", True, 2.0), (1, 2, 1, "uvw", True), (0, 1, 1, "uvw", True),
    ]),
    "uvu": ("3x1o+2x1e", "1x1o+2x2e+5x0e", "3x1e+3x1o", [
        (0, 0, 0, "uvu", True), (0, 0, 0, "uvu", False, 0.3), (0, 1, 1, "uvu", True), (0, 2, 1, "uvu", True),
        (0, 2, 1, "uvu", False),
    ]),
    "uvv": ("3x1o+1x0e", "2x1o+5x2e+1x0e", "2x1e+5x2e+1x1o", [
        (0, 0, 0, "uvv", True), (1, 1, 1, "uvv", False), (0, 0, 0, "uvv", False), (0, 2, 2, "uvv", True),
        (1, 1, 1, "uvv", True),
    ]),
    "uuw": ("2x1o+5x1o+1x0e", "2x2e+5x1o+1x1o", "1x1o+4x3o+3x0e", [
        (0, 0, 0, "uuw", False), (0, 0, 1, "uuw", True), (1, 1, 2, "uuw", True), (2, 2, 0, "uuw", True),
    ]),
    "uuu": ("2x1o+5x0o+1x2e", "2x1o+5x0o+1x1o", "2x1e+5x0e+1x1o", [
        (0, 0, 0, "uuu", True), (1, 1, 1, "uuu", False, 3.0), (2, 2, 2, "uuu", True), (0, 0, 0, "uuu", False),
    ]),
    "uvuv": ("3x1o+2x0o", "2x1o+1x2e+5x0e", "6x2e+3x3o+6x2e+10x0o", [
        (0, 0, 0, "uvuv", True), (0, 1, 1, "uvuv", False), (0, 0, 2, "uvuv", False), (1, 2, 3, "uvuv", True),
    ]),
    "mixed": ("2x1o+2x1e", "1x0e+2x1o", "2x1o+4x1e+2x0e", [
        (0, 0, 0, "uvu", True), (0, 1, 1, "uvuv", False), (0, 1, 2, "uvw", True), (1, 1, 0, "uuu", True),
        (1, 1, 0, "uvv", True), (0, 1, 2, "uuu", False),
    ]),
    "uvv-swapped": ("1o+2e", "4x0e+4x1o", "4x1o+4x2e", [
        (0, 0, 0, "uvv", True), (0, 1, 1, "uvv", True, 2.0), (1, 1, 0, "uvv", False),
    ]),
}  # fmt: skip


def products(layout: str = "mul_ir", **options: Any) -> dict[str, jaxcg.TensorProduct]:
    return {name: jaxcg.TensorProduct(*case, layout=layout, **options) for name, case in MODES.items()}


def orders(function: Callable, problem: Problem) -> tuple[Any, ...]:
    """Value, gradients, and gradients of a function of those gradients: all that training on forces evaluates."""
    cotangent, tangents = problem.cotangent(), problem.tangents()
    operands = tuple(range(len(problem.operands)))

    def backward(*v: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(function, *v)[1](cotangent)

    def contracted(*v: jax.Array) -> jax.Array:
        return sum(jnp.vdot(g, t) for g, t in zip(backward(*v), tangents, strict=True))

    return function(*problem.operands), backward(*problem.operands), jax.grad(contracted, operands)(*problem.operands)


def compare(actual: Callable, expected: Callable, problem: Problem) -> None:
    got = jax.jit(lambda: orders(actual, problem))()
    assert_nonzero(*jax.tree.leaves(got))
    assert_close(got, jax.jit(lambda: orders(expected, problem))())


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("name", MODES)
def test_every_mode_at_every_order(name: str, layout: str) -> None:
    problem = Problem.random(products(layout)[name], nodes=4, edges=6)
    compare(problem.convolve, problem.convolve_by_e3nn, problem)
    rows = problem.on_rows()
    assert_close(rows.multiply(*rows.operands), rows.multiply_by_e3nn(*rows.operands))


@pytest.mark.parametrize("name", MODES)
def test_shared_weights_of_every_mode(name: str) -> None:
    problem = Problem.random(products()[name], nodes=4, edges=6, shared=True)

    def values(function: Callable) -> Any:
        return jax.jit(lambda *v: (function(*v), jax.vjp(function, *v)[1](problem.cotangent())))(*problem.operands)

    assert_close(values(problem.convolve), values(problem.convolve_by_e3nn))


@pytest.mark.parametrize("irrep_normalization", ["component", "norm", "none"])
@pytest.mark.parametrize("path_normalization", ["element", "path", 0.3], ids=str)
def test_normalisations(path_normalization: str | float, irrep_normalization: str) -> None:
    options = {"irrep_normalization": irrep_normalization, "path_normalization": path_normalization}
    problem = Problem.random(products(**options)["mixed"]).on_rows()
    assert_close(problem.multiply(*problem.operands), problem.multiply_by_e3nn(*problem.operands))


def test_every_path_up_to_degree_4_and_both_parities() -> None:
    irreps = e3nn.Irreps("+".join(f"{degree}{parity}" for degree in range(5) for parity in "eo"))
    tp = jaxcg.TensorProduct.channelwise(irreps, irreps, irreps, irrep_normalization="component")
    expected_paths = sum(min(a + b, 4) - abs(a - b) + 1 for a, b in itertools.product(range(5), repeat=2)) * 4
    assert len(tp.instructions) == expected_paths
    # Every pair of components on its own: elementwise in the coefficients, not only in random sums of them.
    first, second = np.meshgrid(np.arange(irreps.dim), np.arange(irreps.dim), indexing="ij")
    x, y = jnp.eye(irreps.dim)[first.ravel()], jnp.eye(irreps.dim)[second.ravel()]
    w = jnp.asarray(np.random.default_rng(0).uniform(0.5, 2.0, tp.weight_numel))
    z = np.asarray(jax.jit(tp)(x, y, w)).reshape(irreps.dim, irreps.dim, -1)
    for number, (i1, i2, i_out, *_) in enumerate(tp.instructions):
        parts = irreps.slices()[i1], irreps.slices()[i2], tp.irreps_out.slices()[i_out]
        ir1, ir2, ir_out = irreps[i1].ir, irreps[i2].ir, tp.irreps_out[i_out].ir
        expected = np.zeros_like(z[..., parts[2]])
        c = np.asarray(e3nn.clebsch_gordan(ir1.l, ir2.l, ir_out.l)) * ir_out.dim**0.5
        expected[parts[0], parts[1]] = float(w[number]) * c
        np.testing.assert_allclose(z[..., parts[2]], expected, rtol=0, atol=1e-13, err_msg=f"{ir1} {ir2} {ir_out}")


def test_empty_blocks_equal_the_list_without_them() -> None:
    instructions = [
        (0, 0, 0, "uvw", True), (1, 0, 0, "uvw", True), (0, 1, 0, "uvw", True), (0, 0, 1, "uvw", True),
        (2, 0, 2, "uvu", True), (2, 1, 2, "uvu", True), (1, 1, 1, "uuu", True), (0, 1, 1, "uvv", False),
    ]  # fmt: skip
    with_empty = jaxcg.TensorProduct("3x0e+0x0e+2x1o", "2x0e+0x0e", "4x0e+0x0e+2x1o", instructions)
    without = jaxcg.TensorProduct("3x0e+2x1o", "2x0e", "4x0e+2x1o", [(0, 0, 0, "uvw", True), (1, 0, 1, "uvu", True)])
    assert with_empty.weight_numel == without.weight_numel
    problem = Problem.random(with_empty)
    assert_close(problem.convolve(*problem.operands), Problem.random(without).convolve_by_e3nn(*problem.operands))


@pytest.mark.parametrize(
    "irreps", [("", "0e", "0e"), ("0e", "", "0e"), ("2x0e", "1o", ""), ("", "", ""), ("0x1o", "0e", "0x1o")], ids=str
)
@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
def test_irreps_without_any_channel(irreps: tuple[str, str, str], layout: str) -> None:
    instructions = [(0, 0, 0, "uvu", True)] if "0x1o" in irreps else []
    tp = jaxcg.TensorProduct(*irreps, instructions, layout=layout)
    assert tp.weight_numel == 0
    problem = Problem.random(tp)
    z = problem.convolve(*problem.operands)
    assert z.shape == (problem.num_nodes, tp.irreps_out.dim) and not z.any()
    gradients = jax.grad(lambda *v: jnp.sum(problem.convolve(*v)), argnums=(0, 1))(*problem.operands)
    assert [g.shape for g in gradients] == [v.shape for v in problem.operands]
    assert not any(g.any() for g in gradients)
    assert problem.on_rows().multiply(*problem.on_rows().operands).shape == (9, tp.irreps_out.dim)


def test_constructors_without_weights_equal_e3nn() -> None:
    rng = np.random.default_rng(0)
    in1, in2 = e3nn.Irreps("2x0e+3x1o+1e"), e3nn.Irreps("2x1o+0e+3x2e")
    x, y = jnp.asarray(rng.standard_normal((4, in1.dim))), jnp.asarray(rng.standard_normal((4, in2.dim)))
    theirs = e3nn.tensor_product(e3nn.IrrepsArray(in1, x), e3nn.IrrepsArray(in2, y), regroup_output=False)
    ours = jaxcg.TensorProduct.full(in1, in2)
    assert ours.irreps_out == theirs.irreps
    assert_close(ours(x, y), theirs.array)
    theirs = e3nn.elementwise_tensor_product(e3nn.IrrepsArray(in1, x), e3nn.IrrepsArray(in2, y))
    ours = jaxcg.TensorProduct.elementwise(in1, in2)
    assert_close(ours(x, y), theirs.array)


@pytest.mark.parametrize("shared", [False, True], ids=["weights-of-edges", "shared-weights"])
@pytest.mark.parametrize("name", ["uvu", "uvw", "mixed"])
@pytest.mark.parametrize("rows", [1, 4, 5], ids=lambda rows: f"blocks-of-{rows}")
def test_the_loop_over_blocks(rows: int, name: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # 13 edges: a last block that is moved back over edges already done, or none; every sum counts each edge once.
    problem = Problem.random(products()[name], edges=13, shared=shared)
    expected = jax.jit(lambda: orders(problem.convolve, problem))()
    with monkeypatch.context() as patch:
        patch.setattr(_reference, "block_rows", lambda coupling: rows)
        looped = jax.jit(lambda: orders(problem.convolve, problem))
        assert "while" in looped.lower().as_text()
        actual = looped()
    assert_close(actual, expected)


def test_the_loop_over_blocks_of_a_channelwise_product(monkeypatch: pytest.MonkeyPatch) -> None:
    tp = jaxcg.TensorProduct.channelwise("3x0e+2x1o", "0e+1o", "0e+1o")
    problem = Problem.random(tp, edges=11)
    problem = Problem(*(getattr(problem, n) for n in ("tp", "x", "y", "w")), problem.senders.at[3].set(-1),
                      problem.receivers.at[10].set(5), 5)  # fmt: skip
    monkeypatch.setattr(_reference, "block_rows", lambda coupling: 4)
    compare(problem.convolve, problem.convolve_by_e3nn, problem)


def temporaries(tp: jaxcg.TensorProduct, order: str, edges: int, shared: bool) -> int:
    """Bytes of temporary memory of a compiled convolution, of its backward, or of its double backward."""
    nodes = 100

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    index = jax.ShapeDtypeStruct((edges,), jnp.int32)
    w = shape(tp.weight_numel) if shared else shape(edges, tp.weight_numel)
    operands = shape(nodes, tp.irreps_in1.dim), shape(edges, tp.irreps_in2.dim), w
    z = shape(nodes, tp.irreps_out.dim)

    def convolve(senders: jax.Array, receivers: jax.Array, *v: jax.Array) -> jax.Array:
        return tp.convolve(*v, senders, receivers, num_nodes=nodes)

    def backward(senders: jax.Array, receivers: jax.Array, *v: jax.Array) -> Any:
        return jax.vjp(lambda *v: convolve(senders, receivers, *v), *v[:3])[1](v[3])

    def double(senders: jax.Array, receivers: jax.Array, *v: jax.Array) -> Any:
        return jax.vjp(lambda *v: backward(senders, receivers, *v), *v[:4])[1](v[4:])

    function, arguments = {
        "forward": (convolve, operands),
        "backward": (backward, (*operands, z)),
        "double_backward": (double, (*operands, z, *operands)),
    }[order]
    with quick_compilation(False):
        compiled = jax.jit(function).lower(index, index, *arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("shared", [False, True], ids=["weights-of-edges", "shared-weights"])
@pytest.mark.parametrize("order", ["forward", "backward", "double_backward"])
def test_memory_does_not_grow_with_edges_times_outputs(order: str, shared: bool) -> None:
    tp = jaxcg.TensorProduct.channelwise("32x0e+32x1o", "0e+1o+2e", "0e+1o+2e")
    few, many = 40_000, 160_000
    assert few > 2 * _reference.BLOCK_ELEMENTS // tp.irreps_out.dim  # The loop runs.
    small, large = (temporaries(tp, order, edges, shared) for edges in (few, many))
    # What is left for each edge: its two indices, and rows of y, as in a sum over a double backward's terms.
    assert large - small < (many - few) * 4 * (2 + 2 * tp.irreps_in2.dim) * 1.1
    assert large - small < 0.05 * (many - few) * tp.irreps_out.dim * 4


def test_memory_of_a_fully_connected_product_holds_no_outer_products() -> None:
    tp = jaxcg.TensorProduct.fully_connected("16x0e+16x1o", "0e+1o", "16x0e+16x1o")
    small, large = (temporaries(tp, "backward", edges, True) for edges in (40_000, 160_000))
    assert large - small < 0.05 * 120_000 * tp.irreps_out.dim * 4


def test_float32_is_not_rounded_further_on_any_platform() -> None:
    # On a GPU the default precision of a matrix product rounds float32 factors to 10 bits.
    for tp in (jaxcg.TensorProduct.full("2x1o", "2x1o"), jaxcg.TensorProduct.channelwise("2x1o", "1o")):
        shapes = [jnp.ones((3, dim), "float32") for dim in (tp.irreps_in1.dim, tp.irreps_in2.dim)]
        w = jnp.ones((3, tp.weight_numel), "float32") if tp.weight_numel else None
        text = jax.jit(lambda x, y: tp(x, y, w, impl="xla")).lower(*shapes).as_text()  # noqa: B023
        products = [line for line in text.splitlines() if "dot_general" in line]
        assert products and all("HIGHEST" in line for line in products)
        with jax.default_matmul_precision("default"):
            text = jax.jit(lambda x, y: tp(x, y, w, impl="xla")).lower(*shapes).as_text()  # noqa: B023
        assert "HIGHEST" not in text
