"""The one table of cases, and what every kernel test needs of a case: operands, term sets, oracle, tolerance."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import combinations
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxcg
from jaxcg import _reference, _terms
from jaxcg._coupling import Coupling
from jaxcg._primitive import Call, resolve
from jaxcg._terms import TermSet

WORKLOADS = json.loads(Path(__file__).with_name("workloads.json").read_text())

ORDERS = ("forward", "backward", "double_backward")


@dataclass(frozen=True)
class Case:
    """A product and a graph.

    Attributes:
        name: test id.
        irreps_in1, irreps_in2, keep: the channelwise product; `keep` filters the output irreps, None keeps all.
        nodes, edges: size of the random graph.
        layout: layout of x and z.
        graph: how edges are drawn: "random" (unsorted, repeated, self and absent edges), "sorted", "single" (sorted,
            one edge for the last receiver), "star" (one receiver), "isolated" (most nodes without edges), "absent" (no
            edge is inside).
        weighted: whether paths have weights.
        indexed: False: the plain product, `edges` rows.
        compensated: whether sums over edges are.
    """

    name: str
    irreps_in1: str
    irreps_in2: str
    keep: str | None
    nodes: int = 23
    edges: int = 150
    layout: str = "mul_ir"
    graph: str = "random"
    weighted: bool = True
    indexed: bool = True
    compensated: bool = False

    @property
    def product(self) -> jaxcg.TensorProduct:
        tp = jaxcg.TensorProduct.channelwise(self.irreps_in1, self.irreps_in2, self.keep, layout=self.layout)
        if self.weighted:
            return tp
        bare = tuple((*ins[:4], False, ins[5]) for ins in tp.instructions)
        return replace_instructions(tp, bare)

    def reduced(self, most: int) -> "Case":
        """The same product with multiplicities of at most `most`, ragged ones still ragged."""
        muls = sorted({mul_ir.mul for mul_ir in jaxcg.TensorProduct.channelwise(self.irreps_in1, "0e").irreps_in1})
        if not muls or muls[-1] <= most:
            return self
        scale = most / muls[-1]
        terms = [term.split("x") if "x" in term else ("1", term) for term in self.irreps_in1.split("+")]
        shrunk = "+".join(f"{max(1, round(int(mul) * scale))}x{ir}" for mul, ir in terms)
        return replace(self, irreps_in1=shrunk)


def replace_instructions(tp: jaxcg.TensorProduct, instructions: tuple) -> jaxcg.TensorProduct:
    """The same product with other instructions."""
    return jaxcg.TensorProduct(
        tp.irreps_in1, tp.irreps_in2, tp.irreps_out, instructions, layout=tp.layout,
        irrep_normalization=tp.irrep_normalization, path_normalization=tp.path_normalization,
    )  # fmt: skip


# Every uvu row of the workloads, alternating layout and order of edges so that each meets both kinds of product.
PRODUCTS = tuple(
    Case(
        name,
        row["in1"],
        row["in2"],
        row["out"],
        layout=("mul_ir", "ir_mul")[number % 2],
        graph=("random", "sorted")[number // 2 % 2],
    )
    for number, (name, row) in enumerate(WORKLOADS["products"].items())
    if row["mode"] == "uvu"
)

# Their kernels take compilers longest.
LONG = ("nequip-benzene", "sevennet-l3i5", "nequip-toluene")

_SMALL = ("0e+1o+2e", "0e+1o+2e")
ODD = (
    Case("mul-1", "0e+1o", *_SMALL),
    Case("mul-33-and-5", "33x0e+5x1o+5x1e", *_SMALL, layout="ir_mul"),
    Case("ragged-small", "5x0e+2x1o+7x2e", *_SMALL, graph="sorted"),
    Case("one-path-to-scalar", "40x1o", "1o", "0e"),
    Case("pseudoscalars", "10x0o+3x1e", "0e+1o", None, layout="ir_mul"),
    Case("l5", "5x5e", "3e", "5e"),
    Case("l5-mul-13", "13x5e", "3e", "5e", layout="ir_mul"),
    Case("single-channel-2e-3e", "2e", "3e", "2e"),
    Case("five-scalars", "5x0e", "1o", "1o"),
    Case("docking-40x0o", "10x1o+40x0o", "0e+1o+2e", None),
    Case("unused-x-block", "7x0e+9x1o", "1o", "1o"),
    Case("mul-130", "130x0e+96x1o", "0e+1o", "0e+1o", layout="ir_mul"),
    # A receiver in more pieces than one thread adds up (with 16 edges a piece).
    Case("star", "20x0e+20x1o", *_SMALL, edges=900, graph="star"),
    Case("compensated", "33x0e+5x1o", *_SMALL, edges=900, graph="star", compensated=True),
    Case("isolated", "20x0e+20x1o", *_SMALL, nodes=300, edges=40, graph="isolated", layout="ir_mul"),
    Case("all-absent", "4x0e+4x1o", *_SMALL, graph="absent"),
    Case("one-edge", "33x0e+3x1o", *_SMALL, nodes=3, edges=1),
    Case("unweighted", "20x0e+33x1o", *_SMALL, weighted=False),
    Case("repeated-blocks", "4x0e+5x1o+0x2e+4x1o", "0e+1o+1o", "0e+1o"),
    Case("36-components-of-y", "3x0e+2x2e", "0e+1o+2e+3o+4e+5o", "0e+1o+2e+3o", layout="ir_mul"),
    Case("mul-1100", "1100x0e+3x1o", "0e+1o", "0e", nodes=5, edges=40),
    Case("twenty-blocks", "+".join(["3x0e", "2x0o"] * 10), "0e", None),
    Case("vector-access", "128x0e+256x1o", "0e+1o", "0e+1o", layout="ir_mul"),
    Case("vector-access-mul_ir", "128x0e+64x1o", "0e+1o", "0e+1o"),
    Case("plain-product", "33x0e+5x1o", *_SMALL, indexed=False),
    Case("plain-product-unweighted", "8x0e+40x1o+2x2e", *_SMALL, indexed=False, weighted=False, layout="ir_mul"),
)
CASES = PRODUCTS + ODD


@lru_cache(maxsize=8)
def term_sets(weighted: bool = True) -> dict[str, TermSet]:
    """The term sets of the three orders, made by the library's own rewrites."""
    return _terms.orders(weighted)


@lru_cache(maxsize=8)
def other_term_sets(weighted: bool = True) -> dict[str, TermSet]:
    """Term sets beside the three orders: gradients alone, forward-mode derivatives, third order."""
    orders = term_sets(weighted)
    slots = [out.slot for out in orders["backward"].outputs]
    alone = {
        f"gradient_{''.join(asked)}": _terms.prune(orders["backward"], [slot in asked for slot in slots])[0]
        for count in (1, 2)
        for asked in combinations(slots, count)
    }

    def pushed(terms: TermSet) -> TermSet:
        derivative = _terms.jvp(terms, [True] * len(terms.operands))
        return _terms.prune(derivative, [True] * len(derivative.outputs))[0]

    tangent = pushed(orders["forward"])
    return alone | {
        "tangent": tangent,
        # Two rows of z for each receiver, which no gradient of the three orders has.
        "value_and_tangent": replace(tangent, outputs=(*orders["forward"].outputs, *tangent.outputs)),
        "tangent_of_gradients": pushed(orders["backward"]),
        "third_order": pushed(orders["double_backward"]),
    }


def make_graph(case: Case, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Senders and receivers of a case, int32, in canonical form: absent edges have a complement as sender."""
    rng = np.random.default_rng(seed)
    n, e = case.nodes, case.edges
    senders, receivers = rng.integers(0, n, e), rng.integers(0, n, e)
    if case.graph == "star":
        receivers[:] = n // 2
    elif case.graph == "isolated":
        receivers = rng.choice([1, n // 2, n - 2], e)
    elif case.graph == "absent":
        senders = ~senders
    if case.graph in ("sorted", "single"):
        receivers = np.sort(receivers)
    if case.graph == "single":
        receivers = np.minimum(receivers, n - 2)
        receivers[-1] = n - 1
    elif case.graph == "random":
        senders = np.where(rng.random(e) < 0.1, ~senders, senders)
        senders[: e // 4] = receivers[: e // 4]
    return senders.astype(np.int32), receivers.astype(np.int32)


def make_call(case: Case, impl: str = "auto") -> Call:
    """The primitive's call for a case, as the public operations make it."""
    ordered = case.indexed and case.graph not in ("sorted", "single")
    rows = case.edges
    return Call(
        product=case.product, expanded=False, swapped=False, weighting="streamed" if case.weighted else "none",
        indexed=case.indexed, ordered=ordered, shared=False, num_rows=rows,
        num_x=case.nodes if case.indexed else rows, num_z=case.nodes if case.indexed else rows, impl=impl,
        compensated=case.compensated,
    )  # fmt: skip


def make_arguments(case: Case, terms: TermSet, dtype: str, seed: int = 0) -> tuple[list[jax.Array], list[jax.Array]]:
    """Indices and operands of a term set, standard normal; NaN wherever an absent edge would be read."""
    call = make_call(case)
    rng = np.random.default_rng(seed + 1)
    indices: list[jax.Array] = []
    absent = np.zeros(call.num_rows, bool)
    if case.indexed:
        senders, receivers = make_graph(case, seed)
        absent = senders < 0
        indices = [jnp.asarray(senders), jnp.asarray(receivers)]
        if call.ordered:
            indices.append(jnp.asarray(np.argsort(receivers, kind="stable").astype(np.int32)))
    operands = []
    for slot in terms.operands:
        array = rng.standard_normal(call.shape(slot)).astype(dtype)
        if slot in "yw":
            array[absent] = np.nan
        operands.append(jnp.asarray(array))
    return indices, operands


@lru_cache(maxsize=256)
def magnitudes_of(call: Call) -> Coupling:
    coupling = resolve(call.product, call.expanded, call.swapped, call.weighting)
    return replace(
        coupling,
        paths=tuple(
            replace(path, entries=tuple((i, j, k, abs(c)) for i, j, k, c in path.entries)) for path in coupling.paths
        ),
    )


# Compiled once for a case and term set, run once or twice: an unoptimised program is done sooner.
_ONCE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@lru_cache(maxsize=512)
def _oracle(call: Call, terms: TermSet) -> Callable[[list[jax.Array], list[jax.Array]], tuple[list, list]]:
    """Compiled: the emulator empties JAX's own caches, and both dtypes of a case share this."""

    def evaluate(coupling: Coupling, indices: list[jax.Array], operands: list[jax.Array]) -> list[jax.Array]:
        return _reference.evaluate(
            coupling, terms, indices[0] if call.indexed else None, indices[1] if call.indexed else None, operands,
            num_rows=call.num_rows, num_x=call.num_x, num_z=call.num_z, shared=False,
        )  # fmt: skip

    @partial(jax.jit, compiler_options=_ONCE)
    def both(indices: list[jax.Array], operands: list[jax.Array]) -> tuple[list, list]:
        sizes = evaluate(magnitudes_of(call), indices, [jnp.abs(operand) for operand in operands])
        return evaluate(call.coupling, indices, operands), sizes

    indices = [jax.ShapeDtypeStruct((call.num_rows,), np.int32)] * call.num_indices
    return both.lower(
        indices, [jax.ShapeDtypeStruct(call.shape(slot), np.float64) for slot in terms.operands]
    ).compile()


def expected(
    case: Case, terms: TermSet, indices: list[jax.Array], operands: list[jax.Array]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The result in float64, and for each of its elements the sum of the magnitudes of all its summands.

    Computed on the CPU by the XLA path, wherever the operands are.
    """
    with jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(np.asarray(operand, "float64")) for operand in operands]
        assert all(operand.dtype == jnp.float64 for operand in wide), "the oracle needs jax_enable_x64"
        exact, sizes = _oracle(make_call(case), terms)([jnp.asarray(np.asarray(index)) for index in indices], wide)
    return [np.asarray(result) for result in exact], [np.asarray(size) for size in sizes]


def bound(sizes: np.ndarray, dtype: str) -> np.ndarray:
    """Largest error of a sum that was computed in `dtype`, element by element.

    Each summand carries at most 8 roundings of its own factors (coefficient, M, two products, two derivative
    products, two partial sums), and n summands add up to sqrt(n) roundings of the running sum if roundings are
    independent (Higham, Accuracy and Stability, section 2.8). The running sum is at most the sum of magnitudes. n
    is 256 here: sums are split into lanes, warps and receivers, none of which adds more in a row in these cases (the
    most are the 150 edges onto one receiver).
    """
    eps = np.finfo(dtype).eps
    return (8 + np.sqrt(256.0)) * eps * sizes


def assert_matches(
    actual: list[jax.Array], exact: list[np.ndarray], sizes: list[np.ndarray], dtype: str, what: str
) -> None:
    """Compare every output on its own, element by element."""
    assert len(actual) == len(exact)
    for number, (got, want, size) in enumerate(zip(actual, exact, sizes, strict=True)):
        got = np.asarray(got, "float64")
        assert got.shape == want.shape, f"{what}: output {number} has shape {got.shape}, expected {want.shape}"
        error = np.abs(got - want)
        wrong = ~(error <= bound(size, dtype) + np.finfo(dtype).tiny)
        assert not wrong.any(), (
            f"{what}: output {number}: {wrong.sum()} of {wrong.size} elements are off, first at "
            f"{np.argwhere(wrong)[0].tolist()}: {got[wrong][0]!r} instead of {want[wrong][0]!r}"
        )
