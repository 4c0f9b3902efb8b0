"""Odd graphs, products and options beside the uniform case, and what a call costs the host.

    python benchmarks/special.py [--output special.jsonl] [--only NAME ...]

Efficiency is the share of a case's own floor (each byte once, see workloads.py). Host cost: a warm call of a compiled
function, in Python and dispatch together, beside one of a function that adds two numbers. First call: trace, choose,
generate, compile, load and run, with an empty cache of kernels and then with a warm one; the number of images that the
cache holds afterwards says whether it was empty.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peers
from checks import derivative
from timing import calls_for, looped, measure
from workloads import ORDERS, SLOT, Graph, Product, floor_ms, graphs, operand_shapes, products

from jaxcg import sort_edges

# Senders and receivers; then, for an order of edges, what sort_edges made of them.
Indices = Callable[[Graph], tuple[np.ndarray, ...]]


def star(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """All edges end at one node."""
    senders, _ = graph.indices()
    return senders, np.full(graph.edges, graph.nodes // 2, np.int32)


def isolated(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """One node of eight has edges, evenly spread."""
    senders, receivers = graph.indices()
    return senders, (receivers // 8 * 8).astype(np.int32)


def padded(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """The first half of the nodes has all edges, as in a padded batch."""
    senders, receivers = graph.indices()
    return senders, (receivers // 2).astype(np.int32)


def uniform(graph: Graph) -> tuple[np.ndarray, np.ndarray]:
    """As in workloads.py."""
    return graph.indices()


def unsorted(graph: Graph) -> tuple[np.ndarray, ...]:
    """The same edges in a random order."""
    order = np.random.default_rng(1).permutation(graph.edges)
    return tuple(index[order] for index in graph.indices())


def with_order(graph: Graph) -> tuple[np.ndarray, ...]:
    """The same, and the order that sorts them."""
    senders, receivers = unsorted(graph)
    order = sort_edges(jnp.asarray(senders), jnp.asarray(receivers), graph.nodes)
    return senders, receivers, np.asarray(order.by_receiver), np.asarray(order.by_sender)


@dataclass(frozen=True)
class Case:
    """A product on a graph, and how it is called.

    Attributes:
        name: in the table.
        product: of the node and edge features.
        graph: its size.
        indices: its edges.
        options: of `convolve`.
        orders: of differentiation.
    """

    name: str
    product: Product
    graph: Graph
    indices: Indices = uniform
    options: tuple[str, ...] = ("receivers_sorted",)
    orders: tuple[str, ...] = ("forward", "backward", "double")

    @property
    def apply(self) -> peers.Apply:
        """The convolution."""
        return peers.jaxcg(self.product, DTYPE, self.graph.nodes, options=self.options).apply


DTYPE = "float32"
MACE = products()["mace-large"]
RAGGED = Product("ragged", "128x0e+64x1o+32x2e", MACE.in2, MACE.out)
ODD = Product("multiplicity 100", "100x0e+100x1o+100x2e", MACE.in2, MACE.out)
WIDE = Product("l up to 4", "64x0e+64x1o+64x2e+64x3o+64x4e", "0e+1o+2e+3o", "0e+1o+2e+3o+4e")
DHFR = graphs()["dhfr"]
CASES = (
    Case("uniform", MACE, DHFR),
    Case("star of 100,000 edges", MACE, Graph("star", 2000, 100_000), star),
    Case("seven nodes of eight isolated", MACE, Graph("isolated", 8000, 56_000), isolated),
    Case("half of the nodes padding", MACE, DHFR, padded),
    Case("ragged 128, 64, 32", RAGGED, DHFR),
    Case("multiplicity 100", ODD, DHFR),
    Case("l up to 4, 64 channels", WIDE, DHFR),
    Case("unsorted, with an order", MACE, DHFR, with_order, ()),
    Case("unsorted, sorted in the call", MACE, DHFR, unsorted, (), ("forward", "backward")),
    Case("deterministic", MACE, DHFR, options=("receivers_sorted", "deterministic"), orders=("backward", "double")),
    Case("deterministic, with an order", MACE, DHFR, with_order, ("deterministic",), ("backward", "double")),
    Case("compensated", MACE, DHFR, options=("receivers_sorted", "compensated")),
)


def compile_case(case: Case, order: str) -> tuple[Any, int]:
    """The compiled loop of a case, and how many calls it makes."""
    shapes = operand_shapes(case.product, case.graph)
    operands = [jax.ShapeDtypeStruct(shapes[name], DTYPE) for name in ORDERS[order][0]]
    operands += [jax.ShapeDtypeStruct((case.graph.edges,), jnp.int32)] * (4 if case.indices is with_order else 2)
    calls = calls_for(floor_ms(case.product, case.graph, order, np.dtype(DTYPE).itemsize))
    program = jax.jit(looped(derivative(case.apply, order), calls), keep_unused=True)
    return program.lower(*operands).compile(), calls


def time_case(compiled: tuple[Any, int], case: Case, order: str) -> float:
    """Milliseconds of a case."""
    shapes = operand_shapes(case.product, case.graph)
    keys = jax.random.split(jax.random.key(0), len(SLOT))
    values = {name: jax.random.normal(key, shapes[name], DTYPE) for name, key in zip(SLOT, keys, strict=True)}
    operands = (*(values[name] for name in ORDERS[order][0]), *map(jnp.asarray, case.indices(case.graph)))
    return measure(compiled[0], operands, compiled[1]).ms


def sort_cost(graph: Graph) -> float:
    """Milliseconds of sort_edges, compiled."""
    program = jax.jit(looped(lambda *edges: tuple(jax.tree.leaves(sort_edges(*edges, graph.nodes))), 20))
    return measure(program, tuple(map(jnp.asarray, unsorted(graph))), 20).ms


def host_cost(calls: int = 300) -> tuple[float, float]:
    """Microseconds to dispatch a warm call of a convolution, and of an addition."""
    product, graph = products()["mace-first"], Graph("small", 23, 180)
    convolution = peers.jaxcg(product, "float32", graph.nodes)
    shapes = operand_shapes(product, graph)
    operands = [jnp.ones(shapes[name], jnp.float32) for name in "xyw"]
    operands += map(jnp.asarray, graph.indices())
    times = []
    for function, given in ((convolution.apply, operands), (jnp.add, operands[:1] * 2)):
        compiled = jax.jit(function)
        jax.block_until_ready(compiled(*given))
        start = time.perf_counter()
        results = [compiled(*given) for _ in range(calls)]
        times.append((time.perf_counter() - start) / calls * 1e6)
        jax.block_until_ready(results)
    return times[0], times[1]


def first_call(order: str) -> float:
    """Seconds of the first call of mace-large in this process, after one of another product has started the device."""
    small = products()["mace-first"]
    time_of = lambda product, graph: _run_once(product, graph, order)  # noqa: E731
    time_of(small, Graph("small", 23, 180))
    return time_of(MACE, Graph("small", 23, 181))


def _run_once(product: Product, graph: Graph, order: str) -> float:
    convolution = peers.jaxcg(product, "float32", graph.nodes)
    shapes = operand_shapes(product, graph)
    operands = [jnp.ones(shapes[name], jnp.float32) for name in ORDERS[order][0]]
    operands += map(jnp.asarray, graph.indices())
    jax.block_until_ready(operands)
    start = time.perf_counter()
    jax.block_until_ready(jax.jit(derivative(convolution.apply, order))(*operands))
    return time.perf_counter() - start


def main() -> None:
    """Measures everything and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("special.jsonl"))
    parser.add_argument("--first-call", choices=list(ORDERS), help="print only the seconds of a first call")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases; and nothing else is measured then")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if arguments.first_call:
        print(first_call(arguments.first_call))
        return
    records: list[dict[str, object]] = []
    pool = ThreadPoolExecutor(min(12, os.cpu_count() or 1))
    cases = [case for case in CASES if not arguments.only or case.name in arguments.only]
    jobs = {(case, order): pool.submit(compile_case, case, order) for case in cases for order in case.orders}
    wait(jobs.values())  # nothing compiles while something is timed
    for (case, order), job in jobs.items():
        ms = time_case(job.result(), case, order)
        floor = floor_ms(case.product, case.graph, order, np.dtype(DTYPE).itemsize)
        records.append({"case": case.name, "order": order, "ms": ms, "floor_ms": floor})
        print(f"{case.name:32s} {order:9s} {ms:8.4f} ms {100 * floor / ms:4.0f} % of its floor", flush=True)
    if not arguments.only:
        records += host_records()
    arguments.output.write_text("".join(json.dumps(record) + "\n" for record in records))


def host_records() -> list[dict[str, object]]:
    """Sorting, host cost, first calls."""
    records: list[dict[str, object]] = [{"sort_edges_ms": sort_cost(DHFR)}]
    print(f"sort_edges: {records[0]['sort_edges_ms']:.3f} ms")
    call, addition = host_cost()
    records.append({"host_us": call, "addition_us": addition})
    print(f"host: {call:.0f} us a warm call, {addition:.0f} us an addition")
    with tempfile.TemporaryDirectory() as cache:
        for state in ("empty", "warm"):
            for order in ("forward", "double"):
                command = [sys.executable, __file__, "--first-call", order]
                # NVRTC keeps what it compiles in the driver's own cache too.
                environment = os.environ | {"JAXCG_CACHE_DIR": cache, "CUDA_CACHE_DISABLE": "1"}
                run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                seconds, images = float(run.stdout.split()[-1]), len(list(Path(cache).rglob("*.image")))
                records.append({"first_call": order, "cache": state, "seconds": seconds, "images": images})
                print(f"first call, {state} cache, {order}: {seconds:.2f} s, {images} images then", flush=True)
    return records


if __name__ == "__main__":
    main()
