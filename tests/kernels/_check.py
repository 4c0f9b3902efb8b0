"""One emulated call against the oracle."""

from collections.abc import Sequence
from functools import lru_cache, partial

import jax
import numpy as np

from jaxcg import _primitive
from jaxcg._terms import TermSet
from jaxcg.codegen import KernelSource
from jaxcg.runtime import launch
from jaxcg.schedule import DeviceLimits
from tests import emulator
from tests._cases import Case, assert_matches, expected, make_arguments, make_call, other_term_sets, term_sets

LIMITS = DeviceLimits()

# A text runs once or a few times, so g++ shall not spend time on its speed.
image = partial(emulator.image, optimize=0)

# (order of threads and blocks, resident blocks): one block, blocks of a few edges, and between.
RUNS = {
    "float32": (("forward", 3), ("reverse", 100), ("shuffled", 7)),
    "float64": (("forward", 1), ("shuffled", 5)),
}


def terms_of(case: Case, name: str) -> TermSet:
    """A term set by its name."""
    return (term_sets(case.weighted) | other_term_sets(case.weighted))[name]


def source_of(case: Case, order: str, dtype: str, limits: DeviceLimits = LIMITS) -> KernelSource:
    """The kernels of a case."""
    return launch.kernel_source(make_call(case), terms_of(case, order), np.dtype(dtype).itemsize, limits)


@lru_cache(maxsize=64)
def oracle(case: Case, order: str, dtype: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What `expected` says; kept, for `emulated` empties JAX's own caches."""
    terms = terms_of(case, order)
    return expected(case, terms, *make_arguments(case, terms, dtype))


def check(case: Case, order: str, dtype: str, runs: Sequence[tuple[str, int]] = ()) -> None:
    """Run one call in several orders of threads and compare every output, inside `emulated`.

    Raises:
        AssertionError: an element is further off than rounding explains.
        jax.errors.JaxRuntimeError: the emulator or a sanitizer found a fault.
    """
    call, terms = make_call(case), terms_of(case, order)
    indices, operands = make_arguments(case, terms, dtype)
    run = jax.jit(partial(_primitive.apply, call, terms)).lower(indices, operands).compile()
    if "jaxcg_launch" not in run.as_text():
        raise RuntimeError("no kernel ran: `check` belongs inside `emulated`")
    exact, sizes = oracle(case, order, dtype)
    for number, (threads, blocks) in enumerate(runs or RUNS[dtype]):
        with emulator.settings(order=threads, blocks=blocks, seed=number):
            assert_matches(run(indices, operands), exact, sizes, dtype, f"{threads} order, {blocks} blocks")
