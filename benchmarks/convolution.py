"""Time the fused convolution, ours and the installed peers', forward and at every order that training needs.

    python benchmarks/convolution.py --implementations jaxcg,oeq,oeq_det --products all --graphs dhfr --dtypes float32

Writes one JSON line for each (product, graph, dtype, implementation, order) into --output and prints a short table
last. A result is first compared, on a small graph of the same product, with the XLA path in float64; a wrong one is
reported and not timed. --small runs reduced products on a tiny graph, on any machine, to try the plumbing.
"""

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
from checks import Reference, derivative, inspect, tolerance
from peers import IMPLEMENTATIONS, Convolution, is_ours
from timing import calls_for, loop_copies, loop_faults, looped, measure, measure_dispatched
from workloads import ORDERS, SLOT, SMALL, Graph, Product, floor_ms, graphs, operand_shapes, products, reduced

Record = dict[str, Any]


class Run:
    """Settings of a run, its clock, and where its records go."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.deadline = time.monotonic() + arguments.budget
        self.records: list[Record] = []
        self.pool = ThreadPoolExecutor(arguments.threads)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        self.file = arguments.output.open("a")

    def emit(self, record: Record) -> None:
        """Keeps a record and writes it down at once, so that a run that is stopped loses nothing."""
        self.records.append(record)
        print(json.dumps(record), file=self.file, flush=True)
        print(
            " ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in record.values()),
            flush=True,
        )

    def attempt(self, case: Record, function: Callable[..., Any], *operands: Any) -> Any:
        """The function's result, or None after a record of what it raised."""
        try:
            return function(*operands)
        except Exception as error:
            if self.arguments.traceback:
                traceback.print_exc()
            first = next(iter(str(error).splitlines()), "")
            self.emit(case | {"failed": f"{type(error).__name__}: {first[:300]}"})
            return None

    def out_of_time(self) -> bool:
        """Whether the budget is spent."""
        return time.monotonic() > self.deadline


def operands_of(product: Product, graph: Graph, dtype: str) -> dict[str, jax.Array]:
    """Random operands of every slot, made on the device."""
    shapes = operand_shapes(product, graph)
    keys = jax.random.split(jax.random.key(0), len(SLOT))
    return {name: jax.random.normal(key, shapes[name], dtype) for name, key in zip(SLOT, keys, strict=True)}


def compile_case(
    run: Run, convolution: Convolution, product: Product, graph: Graph, dtype: str, order: str
) -> tuple[Any, Any, int]:
    """Compiles the loop of an order, and for ours the plain call too; returns both and the calls of the loop."""
    shapes = operand_shapes(product, graph)
    operands = [jax.ShapeDtypeStruct(shapes[name], dtype) for name in ORDERS[order][0]]
    indices = [jax.ShapeDtypeStruct(index.shape, index.dtype) for index in convolution.indices(*graph.indices())]
    function = derivative(convolution.apply, order)
    calls = 4 if run.arguments.small else calls_for(floor_ms(product, graph, order, np.dtype(dtype).itemsize))
    loop = jax.jit(looped(function, calls), keep_unused=True).lower(*operands, *indices).compile()
    plain = None
    if is_ours(convolution.name):
        plain = jax.jit(function, keep_unused=True).lower(*operands, *indices).compile()
    return loop, plain, calls


def time_case(
    run: Run, product: Product, graph: Graph, dtype: str, convolutions: Iterable[Convolution], errors: dict[str, Any]
) -> None:
    """Times every implementation and order of one product on one graph."""
    orders = run.arguments.orders
    itemsize = np.dtype(dtype).itemsize
    jobs: list[tuple[Record, Convolution, str, Any]] = []
    for convolution in convolutions:
        for order in orders:
            where = dict(product=product.name, graph=graph.name, dtype=dtype)
            case = where | dict(implementation=convolution.name, order=order)
            job = run.pool.submit(compile_case, run, convolution, product, graph, dtype, order)
            jobs.append((case, convolution, order, job))
    values = operands_of(product, graph, dtype)
    indices = graph.indices()
    # Nothing compiles while something is timed: with all cores busy, launches come late. (Compiling beside it once made
    # a call of 0.18 ms take 0.62, with a spread of 7.)
    wait([job for *_, job in jobs])
    for case, convolution, order, job in jobs:
        compiled = run.attempt(case, job.result)
        if compiled is None or run.out_of_time():
            continue
        loop, plain, calls = compiled
        operands = (
            *(values[name] for name in ORDERS[order][0]),
            *map(jnp.asarray, convolution.indices(*indices)),
        )
        timing = run.attempt(case, measure, loop, operands, calls)
        if timing is None:
            continue
        text = loop.as_text()
        record = case | dict(
            ms=timing.ms,
            spread=timing.spread,
            calls=timing.calls,
            floor_ms=floor_ms(product, graph, order, itemsize),
            error=errors[convolution.name][order],
            faults=loop_faults(text),
            loop_copies=loop_copies(text, operands),
        )
        if plain is not None:
            record |= inspect(plain)
            record["dispatched_ms"] = run.attempt(case, measure_dispatched, plain, operands)
        run.emit(record)


def checked(
    run: Run, product: Product, dtype: str, reference: Reference
) -> Iterator[tuple[Convolution, dict[str, float]]]:
    """The implementations whose results are right, with their errors; the others leave a record."""

    def check(name: str) -> tuple[Convolution, dict[str, float]]:
        convolution = named(IMPLEMENTATIONS[name](product, dtype, SMALL.nodes), name)
        return convolution, reference.errors(convolution, dtype, run.arguments.orders)

    jobs = [(name, run.pool.submit(check, name)) for name in run.arguments.implementations]
    for name, job in jobs:
        case = dict(product=product.name, graph=SMALL.name, dtype=dtype, implementation=name)
        found = run.attempt(case, job.result)
        if found is None:
            continue
        convolution, errors = found
        wrong = {order: error for order, error in errors.items() if not error <= tolerance(name, dtype)}
        if wrong:
            run.emit(case | {"failed": f"relative error {wrong} over {tolerance(name, dtype)}"})
        elif run.arguments.check_only:
            run.emit(case | {"errors": errors})
        else:
            yield convolution, errors


def named(convolution: Convolution, name: str) -> Convolution:
    """The same under the name it was asked for by."""
    return Convolution(name, convolution.apply, convolution.labels, convolution.indices)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    split = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--implementations", type=split, default=["jaxcg"], help=f"of {', '.join(IMPLEMENTATIONS)}")
    parser.add_argument("--products", type=split, default=["all"])
    parser.add_argument("--graphs", type=split, default=["dhfr"])
    parser.add_argument("--dtypes", type=split, default=["float32", "float64"])
    parser.add_argument("--orders", type=split, default=list(ORDERS))
    parser.add_argument("--output", type=Path, default=Path("convolution.jsonl"))
    parser.add_argument("--budget", type=float, default=500.0, help="seconds after which nothing new is timed")
    parser.add_argument("--threads", type=int, default=min(12, os.cpu_count() or 1), help="that compile")
    parser.add_argument("--small", action="store_true", help="reduced products on a tiny graph")
    parser.add_argument("--check-only", action="store_true", help="compare with the reference, time nothing")
    parser.add_argument("--traceback", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax.config.update("jax_enable_x64", True)
    run = Run(arguments)
    known = products()
    chosen = list(known) if arguments.products == ["all"] else arguments.products
    cases = {name: reduced(known[name]) if arguments.small else known[name] for name in chosen}
    references = {name: run.pool.submit(Reference, product) for name, product in cases.items()}
    for name, product in cases.items():
        if run.out_of_time():
            break
        reference = run.attempt({"product": name}, references[name].result)
        if reference is None:
            continue
        for dtype in arguments.dtypes:
            right = list(checked(run, product, dtype, reference))
            errors = {convolution.name: error for convolution, error in right}
            for graph in [SMALL] if arguments.small else [graphs()[graph] for graph in arguments.graphs]:
                if right and not run.out_of_time():
                    remade = [named(IMPLEMENTATIONS[key](product, dtype, graph.nodes), key) for key in errors]
                    time_case(run, product, graph, dtype, remade, errors)
    run.pool.shutdown(cancel_futures=True)
    if run.out_of_time():
        print("OUT OF TIME: some cases were left out", flush=True)
    print(f"\n{jax.devices()[0].device_kind}, jax {jax.__version__}\n{report.text(run.records)}", flush=True)


if __name__ == "__main__":
    main()
