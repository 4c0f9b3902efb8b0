"""Edges that are absent, unsorted, repeated, none at all; nodes without edges; index and float types."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcg
from tests import emulator
from tests._oracle import SCALARS, SMALL, Problem, assert_close, assert_nonzero, x64

FULLY_CONNECTED = jaxcg.TensorProduct.fully_connected("3x0e+2x1o", "2x0e+1o", "2x0e+3x1o")
NODES, SENDERS = 5, 7


def with_absent_edges(
    tp: jaxcg.TensorProduct, *, shared: bool = False, poison: bool = True
) -> tuple[Problem, np.ndarray]:
    """A problem, and which of its edges are present; operands of absent edges are not a number."""
    problem = Problem.random(tp, nodes=NODES, senders=SENDERS, edges=12, shared=shared)
    senders, receivers = np.array(problem.senders), np.array(problem.receivers)
    largest = np.iinfo(np.int32).max
    senders[[0, 1, 2, 3]] = [-1, SENDERS, largest, -largest - 1]
    receivers[[4, 5, 6, 7]] = [-1, NODES, largest, -largest - 1]
    present = np.arange(12) >= 8
    senders[8] = SENDERS - 1  # In range of x, though not of z.

    def poisoned(v: jax.Array) -> jax.Array:
        return jnp.where(present[:, None], v, jnp.nan) if poison and v.shape[0] == 12 else v

    return replace(
        problem, y=poisoned(problem.y), w=poisoned(problem.w),
        senders=jnp.asarray(senders), receivers=jnp.asarray(receivers),
    ), present  # fmt: skip


def value_and_gradients(problem: Problem, **options: Any) -> tuple[jax.Array, ...]:
    z, pull = jax.vjp(lambda *v: problem.convolve(*v, **options), *problem.operands)
    return z, *pull(problem.cotangent())


def only(problem: Problem, present: np.ndarray) -> Problem:
    w = problem.w if problem.w.ndim == 1 else problem.w[present]
    return replace(problem, y=problem.y[present], w=w,
                   senders=problem.senders[present], receivers=problem.receivers[present])  # fmt: skip


@pytest.mark.parametrize("shared", [False, True], ids=["weights-of-edges", "shared-weights"])
@pytest.mark.parametrize("tp", [SMALL, FULLY_CONNECTED], ids=["channelwise", "fully-connected"])
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_edges_out_of_range_are_absent(jitted: bool, tp: jaxcg.TensorProduct, shared: bool) -> None:
    problem, present = with_absent_edges(tp, shared=shared)
    run = jax.jit(lambda: value_and_gradients(problem)) if jitted else lambda: value_and_gradients(problem)
    z, gx, gy, gw = run()
    expected = value_and_gradients(only(problem, present))
    assert_nonzero(*expected)
    assert_close((z, gx, gy[present]), expected[:3])
    np.testing.assert_array_equal(gy[~present], 0)
    if shared:
        assert_close(gw, expected[3])
    else:
        assert_close(gw[present], expected[3])
        np.testing.assert_array_equal(gw[~present], 0)


def test_derivatives_of_absent_edges_are_zero_at_second_order() -> None:
    problem, present = with_absent_edges(SMALL)

    def penalty(y: jax.Array, w: jax.Array) -> jax.Array:
        return sum(jnp.sum(jnp.sin(g)) for g in value_and_gradients(replace(problem, y=y, w=w)))

    gy, gw = jax.jit(jax.grad(penalty, argnums=(0, 1)))(problem.y, problem.w)
    assert_nonzero(gy[present], gw[present])
    np.testing.assert_array_equal(gy[~present], 0)
    np.testing.assert_array_equal(gw[~present], 0)
    assert np.isfinite(gy).all() and np.isfinite(gw).all()


def test_senders_without_a_present_edge_have_no_gradient_even_if_they_are_nan() -> None:
    problem, _ = with_absent_edges(SMALL, poison=False)
    problem = replace(problem, senders=problem.senders.at[8:].set(jnp.array([1, 2, 1, 2], jnp.int32)))
    x = problem.x.at[jnp.array([0, 3, 6])].set(jnp.nan)
    z, gx, *_ = value_and_gradients(replace(problem, x=x))
    assert np.isfinite(z).all()
    np.testing.assert_array_equal(gx[jnp.array([0, 3, 4, 5, 6])], 0)


def test_emulated_kernels_agree_on_absent_edges() -> None:
    problem, present = with_absent_edges(SCALARS)
    expected = value_and_gradients(problem)
    assert np.isfinite(np.concatenate([np.ravel(v) for v in expected])).all()
    with emulator.emulated():
        actual = jax.jit(lambda: value_and_gradients(problem))()
    assert_close(actual, expected)
    np.testing.assert_array_equal(actual[2][~present], 0)
    np.testing.assert_array_equal(actual[3][~present], 0)


def test_the_order_of_edges_does_not_matter() -> None:
    problem = Problem.random(SMALL, edges=40)
    z, gx, gy, gw = value_and_gradients(problem)
    for seed in range(3):
        by = np.random.default_rng(seed).permutation(40)
        shuffled = value_and_gradients(only(problem, by))
        assert_close(shuffled, (z, gx, gy[by], gw[by]))


def test_repeated_and_self_edges_add() -> None:
    problem = Problem.random(SMALL, edges=8)
    twice = replace(problem, y=jnp.tile(problem.y, (2, 1)), w=jnp.tile(problem.w, (2, 1)),
                    senders=jnp.tile(problem.senders, 2), receivers=jnp.tile(problem.receivers, 2))  # fmt: skip
    assert_close(twice.convolve(*twice.operands), 2 * problem.convolve(*problem.operands))
    loops = replace(problem, senders=jnp.arange(8) % NODES, receivers=jnp.arange(8) % NODES)
    assert_close(loops.convolve(*loops.operands), loops.convolve_by_e3nn(*loops.operands))


@pytest.mark.parametrize("isolated", [[0], [2], [4], [0, 4], [1, 2, 3]], ids=str)
def test_isolated_nodes_are_exactly_zero(isolated: list[int]) -> None:
    others = np.array([n for n in range(NODES) if n not in isolated])
    problem = Problem.random(SMALL, edges=20)
    receivers = jnp.asarray(others[np.arange(20) % len(others)])
    z = problem.tp.convolve(*problem.operands, problem.senders, receivers, num_nodes=NODES)
    np.testing.assert_array_equal(z[jnp.array(isolated)], 0)
    assert_nonzero(*z[others])


@pytest.mark.parametrize("shared", [False, True], ids=["weights-of-edges", "shared-weights"])
@pytest.mark.parametrize(
    ("nodes", "senders", "edges"), [(5, 5, 0), (0, 5, 0), (5, 0, 0), (0, 0, 0), (0, 4, 3), (4, 0, 3)], ids=str
)
def test_nothing_to_sum(nodes: int, senders: int, edges: int, shared: bool) -> None:
    problem = Problem.random(SMALL, nodes=max(nodes, 1), senders=max(senders, 1), edges=edges, shared=shared)
    problem = replace(problem, x=problem.x[:senders], num_nodes=nodes)
    shapes = [(nodes, SMALL.irreps_out.dim), *(v.shape for v in problem.operands)]
    for run in (lambda: value_and_gradients(problem), jax.jit(lambda: value_and_gradients(problem))):
        results = run()
        assert [v.shape for v in results] == shapes
        assert not any(v.any() for v in results)
    batched = jax.vmap(lambda x: problem.convolve(x, *problem.operands[1:]))(problem.x[None])
    assert batched.shape == (1, *shapes[0]) and not batched.any()
    assert not jax.jvp(problem.convolve, problem.operands, problem.tangents())[1].any()


def test_no_rows_of_the_plain_product() -> None:
    x, y = jnp.zeros((0, SMALL.irreps_in1.dim)), jnp.zeros((0, SMALL.irreps_in2.dim))
    w = jnp.ones(SMALL.weight_numel)
    assert SMALL(x, y, w).shape == (0, SMALL.irreps_out.dim)
    assert not jax.grad(lambda w: SMALL(x, y, w).sum())(w).any()
    assert SMALL(x[:, None], y[None], w).shape == (0, 0, SMALL.irreps_out.dim)


def test_the_number_of_nodes_is_never_taken_from_the_data() -> None:
    problem = Problem.random(SMALL, nodes=3)
    for num_nodes in (1, 3, 1000):
        z = SMALL.convolve(*problem.operands, problem.senders, problem.receivers, num_nodes=num_nodes)
        expected = problem.convolve(*problem.operands)
        assert z.shape[0] == num_nodes
        assert_close(z[:3], expected[:num_nodes])
        assert not z[3:].any()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int32", "int64", "uint64"])
def test_index_dtypes(dtype: str) -> None:
    problem = Problem.random(SMALL)
    expected = value_and_gradients(problem)
    for convert in (jnp.asarray, np.asarray):
        cast = replace(problem, senders=convert(problem.senders, dtype), receivers=convert(problem.receivers, dtype))
        assert_close(value_and_gradients(cast), expected)


def test_small_index_dtypes_and_more_nodes_than_they_can_count() -> None:
    problem = Problem.random(SMALL, nodes=300)
    few = problem.senders % 100, problem.receivers % 100
    expected = SMALL.convolve(*problem.operands, *few, num_nodes=300)
    small = SMALL.convolve(*problem.operands, *(v.astype("int8") for v in few), num_nodes=300)
    np.testing.assert_array_equal(small, expected)


@pytest.mark.parametrize("sender", [2**32, 2**32 + 1, -(2**32), 2**63 - 1], ids=str)
@pytest.mark.parametrize("enabled", [False, True], ids=["x64-off", "x64-on"])
def test_no_index_wraps_around(enabled: bool, sender: int) -> None:
    # As a 32-bit number these are in range.
    with x64(enabled):
        problem = Problem.random(SMALL, dtype="float32")
        senders, receivers = np.array(problem.senders, "int64"), np.array(problem.receivers, "int64")
        present = np.ones(9, bool)
        senders[4], present[4] = sender, False
        receivers[5], present[5] = sender, False
        expected = only(problem, present).convolve(*only(problem, present).operands)
        # A JAX array without 64-bit types cannot hold such an index in the first place.
        for convert in (np.asarray, jnp.asarray) if enabled else (np.asarray,):
            indices = convert(senders), convert(receivers)
            assert_close(SMALL.convolve(*problem.operands, *indices, num_nodes=problem.num_nodes), expected)


def test_more_rows_than_an_index_can_count() -> None:
    # Only shapes: a batch whose offsets would wrap around raises instead of losing edges.
    def convolve(x: jax.Array, y: jax.Array, w: jax.Array, index: jax.Array) -> jax.Array:
        return SCALARS.convolve(x, y, w, index, index, num_nodes=2**20)

    def shapes(*batch: int) -> list[jax.ShapeDtypeStruct]:
        sizes = [(2**20, SCALARS.irreps_in1.dim), (7, SCALARS.irreps_in2.dim), (7, SCALARS.weight_numel)]
        floats = [jax.ShapeDtypeStruct((*batch, *size), "float32") for size in sizes]
        return [*floats, jax.ShapeDtypeStruct((*batch, 7), "int32")]

    batched = jax.vmap(convolve)
    assert jax.eval_shape(batched, *shapes(2**10)).shape == (2**10, 2**20, SCALARS.irreps_out.dim)
    with pytest.raises(jaxcg.GraphError, match=r"at most 2147483647 .* got .* 2147483648 receivers"):
        jax.eval_shape(batched, *shapes(2**11))
    with pytest.raises(jaxcg.GraphError, match="at most 2147483647"):
        problem = Problem.random(SCALARS)
        jax.eval_shape(lambda: SCALARS.convolve(*problem.operands, problem.senders, problem.receivers, num_nodes=2**31))
    # The plain product has no index.
    assert jax.eval_shape(SCALARS, *(jax.ShapeDtypeStruct((2**32, *s.shape[1:]), "float32") for s in shapes()[:3]))


@pytest.mark.parametrize("indices", ["int32", "int64"])
def test_the_same_float32_bits_with_and_without_x64(indices: str) -> None:
    found = []
    for enabled in (True, False):
        with x64(enabled):
            problem = Problem.random(SMALL, edges=50, dtype="float32")
            problem = replace(problem, senders=np.asarray(problem.senders, indices),
                              receivers=np.asarray(problem.receivers, indices))  # fmt: skip
            results = jax.jit(lambda p=problem: value_and_gradients(p))()
            assert {v.dtype for v in results} == {jnp.dtype("float32")}
            found.append([np.asarray(v) for v in results])
    for on, off in zip(*found, strict=True):
        np.testing.assert_array_equal(on, off)


def test_dtypes_promote() -> None:
    problem = Problem.random(SMALL)
    x, y, w = problem.operands
    single = [v.astype("float32") for v in problem.operands]
    assert problem.convolve(*single).dtype == jnp.float32
    for n in range(3):
        mixed = [v if n == m else v.astype("float32") for m, v in enumerate(problem.operands)]
        assert problem.convolve(*mixed).dtype == jnp.float64
        gradients = jax.grad(lambda *v: problem.convolve(*v).sum(), argnums=(0, 1, 2))(*mixed)
        assert [g.dtype for g in gradients] == [v.dtype for v in mixed]
    # Numbers without a type of their own, and integers, take the type of the others.
    assert problem.convolve(single[0], jnp.ones_like(y, dtype="int32"), single[2]).dtype == jnp.float32
    assert SMALL(np.asarray(x[0]), np.asarray(y[0]), np.asarray(w[0])).dtype == jnp.float64


@pytest.mark.parametrize("emulate", [False, True], ids=["xla", "emulated"])
def test_edge_orders_sorted_edges_and_neither(emulate: bool) -> None:
    problem, _ = with_absent_edges(SCALARS)
    by = np.argsort(np.clip(problem.receivers, 0, NODES - 1), kind="stable")
    in_order = only(problem, by)
    order = jaxcg.sort_edges(problem.senders, problem.receivers, NODES)
    expected = value_and_gradients(problem)

    def every_way() -> list[tuple[jax.Array, ...]]:
        z, gx, gy, gw = jax.jit(lambda: value_and_gradients(in_order, receivers_sorted=True))()
        back = np.argsort(by)
        ordered = jax.jit(lambda order: value_and_gradients(problem, edge_order=order))(order)
        both = jax.jit(lambda: value_and_gradients(in_order, receivers_sorted=True,
            edge_order=jaxcg.sort_edges(in_order.senders, in_order.receivers, NODES)))()  # fmt: skip
        return [
            jax.jit(lambda: value_and_gradients(problem))(), ordered,
            (z, gx, gy[back], gw[back]), (both[0], both[1], both[2][back], both[3][back]),
        ]  # fmt: skip

    if emulate:
        with emulator.emulated():
            found = every_way()
    else:
        found = every_way()
    for values in found:
        assert_close(values, expected)


def test_a_wrong_claim_of_sortedness_stays_in_bounds() -> None:
    # What it computes is undefined; what it reads and writes is not (the emulator's buffers end where arrays end).
    problem, _ = with_absent_edges(SCALARS)
    wrong = jaxcg.EdgeOrder(jnp.asarray([10**6, -5, *range(2, 12)], jnp.int32))
    with emulator.emulated():
        jax.block_until_ready(jax.jit(lambda: value_and_gradients(problem, receivers_sorted=True))())
        jax.block_until_ready(jax.jit(lambda o: value_and_gradients(problem, edge_order=o))(wrong))


def test_a_wrong_claim_of_sortedness_is_found_when_asked_for() -> None:
    problem = Problem.random(SMALL)
    by = np.argsort(problem.receivers, kind="stable")
    right, stale = jaxcg.EdgeOrder(jnp.asarray(by)), jaxcg.EdgeOrder(jnp.asarray(by[::-1].copy()))
    assert not np.array_equal(by, np.arange(len(by)))
    in_order = only(problem, by)
    expected = problem.convolve(*problem.operands)
    for checked in (
        in_order.convolve(*in_order.operands, receivers_sorted=True, check_sorted=True),
        problem.convolve(*problem.operands, edge_order=right, check_sorted=True),
        problem.convolve(*problem.operands, check_sorted=True),
        jax.jit(lambda o: problem.convolve(*problem.operands, edge_order=o, check_sorted=True))(right),
    ):
        assert_close(checked, expected)
    with pytest.raises(jaxcg.GraphError, match=r"receivers.*ascending order.*after a higher one at edge"):
        problem.convolve(*problem.operands, receivers_sorted=True, check_sorted=True)
    with pytest.raises(jaxcg.GraphError, match="ascending order"):
        problem.convolve(*problem.operands, edge_order=stale, check_sorted=True)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ascending order"):
        jax.block_until_ready(
            jax.jit(lambda o: problem.convolve(*problem.operands, edge_order=o, check_sorted=True))(stale)
        )
        jax.effects_barrier()


def test_sort_edges() -> None:
    senders, receivers = jnp.array([0, 0, 1, 2, -1, 9]), jnp.array([2, 0, 7, 0, 1, -3])
    order = jax.jit(jaxcg.sort_edges, static_argnums=2)(senders, receivers, 3)
    assert order.by_receiver.dtype == jnp.int32
    np.testing.assert_array_equal(order.by_receiver, [1, 3, 5, 4, 0, 2])
    assert jaxcg.sort_edges(senders[:0], receivers[:0], 0).by_receiver.shape == (0,)
    # A pytree: it passes through jit and scan, and lives in a carry.
    assert jax.tree.structure(order) == jax.tree.structure(jaxcg.sort_edges(receivers, senders, 3))


def test_the_check_of_sortedness_knows_unsigned_indices_and_broken_orders() -> None:
    problem = Problem.random(SMALL)
    unsigned = replace(problem, receivers=problem.receivers.astype("uint32"))
    with pytest.raises(jaxcg.GraphError, match="ascending order"):
        unsigned.convolve(*problem.operands, receivers_sorted=True, check_sorted=True)
    count = len(problem.receivers)
    for broken in (np.zeros(count, int), np.arange(count) + 1):
        with pytest.raises(jaxcg.GraphError, match="each edge number once"):
            order = jaxcg.EdgeOrder(jnp.asarray(broken))
            problem.convolve(*problem.operands, edge_order=order, check_sorted=True)
