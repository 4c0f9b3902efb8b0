"""What XLA makes of a call on the GPU: the custom call, no gathered rows, no memory that grows with the edges."""

import re
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcg
from jaxcg import _reference
from tests._cases import (
    ORDERS,
    PRODUCTS,
    WORKLOADS,
    Case,
    bound,
    magnitudes_of,
    make_call,
    make_graph,
    term_sets,
)
from tests.gpu.conftest import BY_NAME, compile_case

pytestmark = pytest.mark.gpu
# What each order takes beside the indices.
SLOTS = {"forward": "xyw", "backward": "xywz", "double_backward": "xywzxyw"}


def derivatives(case: Case, impl: str = "cuda") -> dict[str, Callable[..., object]]:
    """The three orders by the public face: functions of senders, receivers, order of edges, and operands."""
    tp = case.product

    def forward(graph: tuple, x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        senders, receivers, order = graph
        return tp.convolve(
            x, y, w, senders, receivers,
            num_nodes=case.nodes, edge_order=order, receivers_sorted=order is None, impl=impl,
        )  # fmt: skip

    def backward(graph: tuple, x: jax.Array, y: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(lambda *operands: forward(graph, *operands), x, y, w)[1](g)

    def double_backward(graph: tuple, x, y, w, g, *cotangents) -> tuple[jax.Array, ...]:
        return jax.vjp(lambda *operands: backward(graph, *operands), x, y, w, g)[1](cotangents)

    return {"forward": forward, "backward": backward, "double_backward": double_backward}


def shapes(case: Case, order: str, dtype: str) -> list[jax.ShapeDtypeStruct]:
    call = make_call(case)
    return [jax.ShapeDtypeStruct(call.shape(slot), dtype) for slot in SLOTS[order]]


def compile_by_public_face(case: Case, order: str, dtype: str) -> jax.stages.Compiled:
    edges = jax.ShapeDtypeStruct((case.edges,), jnp.int32)
    # As the case has it, so that its kernels are those that were compiled before.
    graph = (edges, edges, None if case.graph == "sorted" else jaxcg.EdgeOrder(edges))
    return jax.jit(derivatives(case)[order]).lower(graph, *shapes(case, order, dtype)).compile()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", [case.name for case in PRODUCTS])
def test_one_custom_call_and_no_gathered_rows(name: str, order: str, dtype: str) -> None:
    case = BY_NAME[name]
    text = compile_by_public_face(case, order, dtype).as_text()
    assert text.count('custom_call_target="jaxcg_launch"') == 1
    gathered = re.findall(r"= \w+\[([\d,]+)\]\S* (?:gather|dynamic-slice)\(", text)
    sizes = [int(np.prod([int(n) for n in shape.split(",")])) for shape in gathered]
    assert all(size < case.edges * case.product.irreps_in1.dim for size in sizes), gathered


def at_size(name: str, graph: str) -> Case:
    """A product on a graph of the workloads."""
    size = WORKLOADS["graphs"][graph]
    case = BY_NAME[name]
    return Case(name, case.irreps_in1, case.irreps_in2, case.keep, nodes=size["nodes"], edges=size["edges"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("order", ORDERS)
def test_memory_does_not_grow_with_the_messages(order: str, dtype: str) -> None:
    case = at_size("mace-large", "dhfr")
    call, itemsize = make_call(case), np.dtype(dtype).itemsize
    stats = compile_by_public_face(case, order, dtype).memory_analysis()
    # Gradients of w are results here, not temporaries.
    allowed = 0.05 * case.edges * call.coupling.dim_out * itemsize
    assert stats.temp_size_in_bytes < allowed


@pytest.mark.parametrize("order", ORDERS)
def test_mace_large_on_a_protein(order: str, targets: tuple[str, ...]) -> None:
    """The size that is measured: both dtypes against the XLA path in float64 on the same device."""
    case = at_size("mace-large", "dhfr")
    call, terms = make_call(case), term_sets()[order]
    senders, receivers = (jnp.asarray(index) for index in make_graph(case, seed=3))
    edge_order = jaxcg.sort_edges(senders, receivers, case.nodes)
    keys = jax.random.split(jax.random.key(7), len(terms.operands))
    operands = [
        jax.random.normal(key, call.shape(slot), jnp.float32).astype(jnp.float64)
        for key, slot in zip(keys, SLOTS[order], strict=True)
    ]

    def evaluate(coupling, operands: list[jax.Array]) -> list[jax.Array]:
        return _reference.evaluate(
            coupling, terms, senders, receivers, operands,
            num_rows=case.edges, num_x=case.nodes, num_z=case.nodes, shared=False,
        )  # fmt: skip

    # Not tuned: compiled for one run.
    jit = partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})
    exact = jit(lambda o: evaluate(call.coupling, o))(operands)
    sizes = jit(lambda o: evaluate(magnitudes_of(call), [jnp.abs(operand) for operand in o]))(operands)
    for dtype in ("float32", "float64"):
        compile_case(case, order, dtype, targets)
        run = jax.jit(derivatives(case)[order])
        given = [operand.astype(dtype) for operand in operands]
        for _ in range(4):
            results = run((senders, receivers, edge_order), *given)
        for n, (got, want, size) in enumerate(zip(jax.tree.leaves(results), exact, sizes, strict=True)):
            assert got.shape == want.shape and got.dtype == dtype
            right = jnp.abs(got - want) <= bound(size, dtype)
            assert bool(right.all()), f"output {n}: {int((~right).sum())} of {right.size} elements are off"
