"""Generated kernels on the CPU, through the primitive, against the XLA path in float64: element by element.

Every case and order (in float64 a few by default, all with ``--slow``: texts are the same but for the type and what the
schedule makes of its size); single gradients, forward mode and third order on a few. Results start as not a
number, so an element that no kernel writes shows. Threads and blocks run in several orders, with ranges of edges that
cut receivers in different places.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcg
from jaxcg.runtime import launch
from jaxcg.schedule import SHARE, choose, is_packed
from tests import emulator
from tests._ahead import Ahead, parameters
from tests._cases import CASES, ORDERS, PRODUCTS, make_call, other_term_sets, term_sets
from tests.kernels._check import LIMITS, check, image, source_of

# In layout mul_ir two chunks of channels, the second with a tail. In layout ir_mul whole chunks of 64 channels, which
# vector accesses need.
SMALL = {case.name: case.reduced(40 if case.layout == "mul_ir" else 64) if case in PRODUCTS else case for case in CASES}
FEW = ("mul-33-and-5", "plain-product", "repeated-blocks")
DTYPES = ("float32", "float64")
# In float64 by default too: products, and odd cases in which its size or the width of its accesses matters.
BOTH = (
    *("mace-large", "nequip-water", "mul-33-and-5", "l5-mul-13", "star", "compensated"),
    *("vector-access", "vector-access-mul_ir", "plain-product", "mul-130"),
)


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Iterator[Ahead[tuple[str, str, str], bytes]]:
    """Kernels of a case as programs for the CPU."""
    keys = [
        (str(given["name"]), str(given["order"]), str(given.get("dtype", "float32")))
        for function in ("test_case", "test_other_term_sets")
        for given in parameters(request, function)
    ]
    ahead = Ahead(lambda key: image(source_of(SMALL[key[0]], *key[1:]).text), keys, request.config)
    yield ahead
    ahead.close()


@pytest.fixture(scope="module")
def kernels() -> Iterator[None]:
    """The primitive takes its kernels on the CPU."""
    with emulator.emulated(image):
        yield


def every_key() -> Iterator[object]:
    for name, order, dtype in product(SMALL, ORDERS, DTYPES):
        slow = dtype == "float64" and name not in BOTH
        yield pytest.param(name, order, dtype, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("name, order, dtype", every_key())
def test_case(name: str, order: str, dtype: str, built: Ahead, kernels: None) -> None:
    built((name, order, dtype))
    check(SMALL[name], order, dtype)


@pytest.mark.parametrize("order", other_term_sets())
@pytest.mark.parametrize("name", FEW)
def test_other_term_sets(name: str, order: str, built: Ahead, kernels: None) -> None:
    built((name, order, "float32"))
    check(SMALL[name], order, "float32")


def test_cases_meet_what_kernels_must_handle() -> None:
    """The table keeps the situations for which it was made, whatever schedules become."""
    seen = set()
    for case in SMALL.values():
        call = make_call(case)
        for terms, itemsize in product(term_sets(case.weighted).values(), (4, 8)):
            schedule = choose(call.coupling, terms, itemsize, LIMITS)
            groups = [group for launch_ in schedule.launches for group in launch_.groups]
            roles = [role for group in groups for role in group.roles]
            packed = {"vector" if is_packed(call.coupling, role) else "strided" for role in roles}
            seen |= {f"{access} access, {case.layout}" for access in packed}
            seen |= {"roles of later channels"} if any(role.chunk_start for role in roles) else set()
            seen |= {"several launches"} if len(schedule.launches) > 1 else {"one launch"}
            seen |= {"teams of several warps" if group.chunks > 1 else "teams of one warp" for group in groups}
            seen |= {"one piece among teams" for group in groups for r in group.roles if r.pieces < group.teams}
            seen |= {"roles in pieces" for role in roles if role.pieces > 1}
            seen |= {"a piece shorter than a team's work" for role in roles if role.start % SHARE and role.end % SHARE}
            seen |= {"scratch"} if call.indexed and any(out.slot == "z" for out in terms.outputs) else {"no scratch"}
        muls = {path.mul1 for path in call.coupling.paths}
        seen |= {"ragged"} if len(muls) > 1 else {"uniform"}
        seen |= {"tail"} if any(mul % 32 for mul in muls) else {"whole warps"}
        seen |= {"ordered" if call.ordered else "sorted" if call.indexed else "rows", case.layout}
    assert seen == {
        *("several launches", "one launch", "teams of several warps", "teams of one warp", "scratch", "no scratch"),
        *("roles in pieces", "one piece among teams", "a piece shorter than a team's work"),
        *("ragged", "uniform", "tail", "whole warps", "ordered", "sorted", "rows", "mul_ir", "ir_mul"),
        *(f"{access} access, {layout}" for access in ("vector", "strided") for layout in ("mul_ir", "ir_mul")),
        "roles of later channels",
    }


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_schedules_for_larger_devices(target: str, order: str) -> None:
    """More shared memory gives other schedules: more stages on their way, more blocks."""
    with emulator.emulated(image, launch.limits_of([target])):
        check(SMALL["repeated-blocks"], order, "float32")


def graph_arguments(tp: jaxcg.TensorProduct, w_shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(5)
    nodes, edges = 11, 60
    shapes = [(nodes, tp.irreps_in1.dim), (edges, tp.irreps_in2.dim), w_shape]
    indices = [jnp.asarray(rng.integers(-1, nodes + 1, edges)) for _ in range(2)]
    return *(jnp.asarray(rng.standard_normal(shape)) for shape in shapes), *indices


CHANNELWISE = jaxcg.TensorProduct.channelwise("9x0e+33x1o", "0e+1o", "0e+1o")
SHARED_SLOTS = jaxcg.TensorProduct(
    "3x0e+3x1o",
    "0e+1o",
    "3x0e+3x1o",
    [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True), (0, 1, 1, "uvu", False), (1, 0, 1, "uvu", True)],
)


@pytest.mark.parametrize(
    "tp, shared",
    [(CHANNELWISE, True), (SHARED_SLOTS, False), (SHARED_SLOTS, True)],
    ids=["shared-weights", "shared-slots", "shared-both"],
)
def test_what_the_operations_make_of_a_product(tp: jaxcg.TensorProduct, shared: bool, kernels: None) -> None:
    """Private slots, weights applied afterwards, paths without weights: energy and all gradients, as with XLA."""
    x, y, w, senders, receivers = graph_arguments(tp, (tp.weight_numel,) if shared else (60, tp.weight_numel))

    def energy(impl: str, x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        z = tp.convolve(x, y, w, senders, receivers, num_nodes=11, impl=impl)
        return jnp.sum(z * jnp.cos(z))

    def force_loss(impl: str, *operands: jax.Array) -> jax.Array:
        gradients = jax.grad(partial(energy, impl), (0, 1, 2))(*operands)
        return sum(jnp.sum(gradient**2) for gradient in gradients)

    both = lambda impl: jax.jit(jax.value_and_grad(partial(force_loss, impl), (0, 1, 2)))  # noqa: E731
    assert both("auto").lower(x, y, w).as_text().count("jaxcg_launch") >= 3
    for got, want in zip(*(jax.tree.leaves(both(impl)(x, y, w)) for impl in ("auto", "xla")), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11 * np.abs(want).max())


def test_uvv_runs_with_its_operands_exchanged(kernels: None) -> None:
    tp = jaxcg.TensorProduct("0e+1o", "7x0e+5x1o", "7x1o+5x0e", [(1, 0, 0, "uvv", True), (1, 1, 1, "uvv", True)])
    x, y, w, *_ = graph_arguments(tp, (60, tp.weight_numel))
    x = jnp.tile(x, (6, 1))[:60]

    def energy(impl: str, *operands: jax.Array) -> jax.Array:
        return jnp.sum(tp(*operands, impl=impl) ** 2)

    both = lambda impl: jax.jit(jax.value_and_grad(partial(energy, impl), (0, 1, 2)))  # noqa: E731
    assert "jaxcg_launch" in both("auto").lower(x, y, w).as_text()
    for got, want in zip(*(jax.tree.leaves(both(impl)(x, y, w)) for impl in ("auto", "xla")), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11 * np.abs(want).max())


def test_batches_of_graphs_are_one_call(kernels: None) -> None:
    """vmap offsets the indices: a batch of 3 equals 3 calls, absent edges included."""
    tp = CHANNELWISE
    graphs = [graph_arguments(tp, (60, tp.weight_numel)) for _ in range(3)]
    x, y, w, senders, receivers = (
        jnp.stack([(n + 1) * a if a.dtype == float else a for n, a in enumerate(arrays)])
        for arrays in zip(*graphs, strict=True)
    )
    senders = senders.at[1].set(senders[1, ::-1])
    convolve = partial(tp.convolve, num_nodes=11)
    batched = jax.jit(jax.vmap(convolve))
    assert batched.lower(x, y, w, senders, receivers).as_text().count("custom_call @jaxcg_launch") == 1
    got = batched(x, y, w, senders, receivers)
    for n in range(3):
        want = convolve(x[n], y[n], w[n], senders[n], receivers[n], impl="xla")
        np.testing.assert_allclose(got[n], want, rtol=1e-11, atol=1e-11 * np.abs(want).max())


@pytest.mark.parametrize("mode", ["uvu", "uvv"])
def test_weights_of_paths_that_contribute_nothing_have_no_gradient(mode: str) -> None:
    # Their columns of w belong to no path of the kernel, which must not leave them unwritten.
    irreps = ("4x0e", "0e") if mode == "uvu" else ("0e", "4x0e")
    paths = [(0, 0, 0, mode, True, 1.0), (0, 0, 1, mode, True, 0.0)]
    tp = jaxcg.TensorProduct(*irreps, "4x0e+4x0e", paths)
    x, y, w = jnp.ones((5, tp.irreps_in1.dim)), jnp.ones((5, tp.irreps_in2.dim)), jnp.ones((5, 8))
    index = jnp.arange(5) % 3

    def total(w: jax.Array) -> jax.Array:
        rows = tp(x, y, w, impl="cuda").sum()
        return rows if mode == "uvv" else rows + tp.convolve(x, y, w, index, index, num_nodes=3, impl="cuda").sum()

    with emulator.emulated():
        gradient = np.asarray(jax.jit(jax.grad(total))(w))
    times = 1.0 if mode == "uvv" else 2.0
    np.testing.assert_array_equal(gradient, [[times] * 4 + [0.0] * 4] * 5)


def test_uvv_in_layout_ir_mul_with_an_empty_block() -> None:
    tp = jaxcg.TensorProduct("0e", "2x0e+0x1o", "2x0e", [(0, 0, 0, "uvv", True)], layout="ir_mul")
    x, y, w = jnp.full((3, 1), 2.0), jnp.arange(6.0).reshape(3, 2), jnp.full((3, 2), 3.0)
    np.testing.assert_allclose(tp(x, y, w), 6.0 * y, rtol=1e-15)
    with emulator.emulated():
        np.testing.assert_allclose(jax.jit(lambda: tp(x, y, w, impl="cuda"))(), 6.0 * y, rtol=1e-15)
