"""Odd graphs and products beside the uniform one, and what a call costs the host.

    python benchmarks/special.py [--output special.jsonl]

Efficiency is the share of a case's own floor (each byte once, see workloads.py). Host cost: a warm call of a compiled
function, in Python and dispatch together, beside one of a function that adds two numbers. First call: trace, choose,
generate, compile, load and run, with an empty cache of kernels and then with a warm one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peers
from checks import derivative
from timing import calls_for, looped, measure
from workloads import ORDERS, SLOT, Graph, Product, floor_ms, graphs, operand_shapes, products

Indices = Callable[[Graph], tuple[np.ndarray, np.ndarray]]


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


MACE = products()["mace-large"]
RAGGED = Product("ragged", "128x0e+64x1o+32x2e", MACE.in2, MACE.out)
ODD = Product("multiplicity 100", "100x0e+100x1o+100x2e", MACE.in2, MACE.out)
WIDE = Product("l up to 4", "64x0e+64x1o+64x2e+64x3o+64x4e", "0e+1o+2e+3o", "0e+1o+2e+3o+4e")
DHFR = graphs()["dhfr"]
CASES: tuple[tuple[str, Product, Graph, Indices], ...] = (
    ("uniform", MACE, DHFR, uniform),
    ("star of 100,000 edges", MACE, Graph("star", 2000, 100_000), star),
    ("seven nodes of eight isolated", MACE, Graph("isolated", 8000, 56_000), isolated),
    ("half of the nodes padding", MACE, DHFR, padded),
    ("ragged 128, 64, 32", RAGGED, DHFR, uniform),
    ("multiplicity 100", ODD, DHFR, uniform),
    ("l up to 4, 64 channels", WIDE, DHFR, uniform),
)


def compile_case(product: Product, graph: Graph, order: str, dtype: str) -> tuple[Any, int]:
    """The compiled loop of a case, and how many calls it makes."""
    convolution = peers.jaxcg(product, dtype, graph.nodes)
    shapes = operand_shapes(product, graph)
    operands = [jax.ShapeDtypeStruct(shapes[name], dtype) for name in ORDERS[order][0]]
    operands += [jax.ShapeDtypeStruct((graph.edges,), jnp.int32)] * 2
    calls = calls_for(floor_ms(product, graph, order, np.dtype(dtype).itemsize))
    program = jax.jit(looped(derivative(convolution.apply, order), calls), keep_unused=True)
    return program.lower(*operands).compile(), calls


def time_case(
    compiled: tuple[Any, int], product: Product, graph: Graph, indices: Indices, order: str, dtype: str
) -> float:
    """Milliseconds of a case."""
    shapes = operand_shapes(product, graph)
    keys = jax.random.split(jax.random.key(0), len(SLOT))
    values = {name: jax.random.normal(key, shapes[name], dtype) for name, key in zip(SLOT, keys, strict=True)}
    operands = (*(values[name] for name in ORDERS[order][0]), *map(jnp.asarray, indices(graph)))
    return measure(compiled[0], operands, compiled[1]).ms


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
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if arguments.first_call:
        print(first_call(arguments.first_call))
        return
    records: list[dict[str, object]] = []
    orders = ("forward", "backward", "double")
    pool = ThreadPoolExecutor(min(12, os.cpu_count() or 1))
    jobs = {(p, g, o): pool.submit(compile_case, p, g, o, "float32") for _, p, g, _ in CASES for o in orders}
    for name, product, graph, indices in CASES:
        for order in orders:
            ms = time_case(jobs[product, graph, order].result(), product, graph, indices, order, "float32")
            floor = floor_ms(product, graph, order, 4)
            records.append({"case": name, "order": order, "ms": ms, "floor_ms": floor})
            print(f"{name:32s} {order:9s} {ms:8.4f} ms {100 * floor / ms:4.0f} % of its floor", flush=True)
    call, addition = host_cost()
    records.append({"host_us": call, "addition_us": addition})
    print(f"host: {call:.0f} us a warm call, {addition:.0f} us an addition")
    with tempfile.TemporaryDirectory() as cache:
        for state in ("empty", "warm"):
            for order in ("forward", "double"):
                command = [sys.executable, __file__, "--first-call", order]
                run = subprocess.run(
                    command, env=os.environ | {"JAXCG_CACHE_DIR": cache}, capture_output=True, text=True, check=True
                )
                records.append({"first_call": order, "cache": state, "seconds": float(run.stdout.split()[-1])})
                print(f"first call, {state} cache, {order}: {run.stdout.split()[-1]} s", flush=True)
    arguments.output.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()
