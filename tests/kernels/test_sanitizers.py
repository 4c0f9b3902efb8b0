"""Generated kernels under AddressSanitizer and ThreadSanitizer, each call in a process of its own.

AddressSanitizer sees every access outside a buffer, ThreadSanitizer every pair of accesses that nothing orders, also
where the values come out right. Sizes are small; tails, cut and empty receivers and absent edges are all there.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import jax
import pytest

from jaxcg.runtime import launch
from tests import emulator
from tests._cases import ORDERS, Case
from tests.emulator.compiler import Sanitizer
from tests.kernels._check import check

TAILS = Case("tails", "5x0e+33x1o", "0e+1o", "0e+1o", nodes=9, edges=70)
CASES = {
    "tails": TAILS,
    "tails-ir_mul": replace(TAILS, layout="ir_mul"),
    "rows": replace(TAILS, indexed=False, edges=9),
    "vector-access": Case("packed", "64x0e+128x1o", "0e+1o", "0e", layout="ir_mul", graph="sorted", nodes=9, edges=70),
    # Teams of several warps, over several batches, with a role that follows another.
    "teams": Case("teams", "70x0e+70x1o", "0e+1o", "0e+1o", nodes=19, edges=240),
    "one-receiver": Case("star", "3x0e+2x1o", "0e+1o", "0e+1o", graph="star", nodes=9, edges=70),
}


def every_run() -> Iterator[object]:
    """Few blocks; and many, under ThreadSanitizer with --slow: threads in a shuffled order take it long."""
    for name, order, sanitizer in product(CASES, ORDERS, ("address", "thread")):
        yield pytest.param(name, order, sanitizer, ("forward", 1 if name == "teams" else 3))
        if name != "teams":
            slow = [pytest.mark.slow] if sanitizer == "thread" else []
            yield pytest.param(name, order, sanitizer, ("shuffled", 100), marks=slow)


@pytest.mark.parametrize("name, order, sanitizer, run", every_run())
def test_nothing_is_found(name: str, order: str, sanitizer: Sanitizer, run: tuple[str, int]) -> None:
    with emulator.emulated(emulator.sanitized_image(sanitizer)):
        check(CASES[name], order, "float32", [run])


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_with_more_stages(sanitizer: Sanitizer) -> None:
    """The schedule for a device with more shared memory, in float64."""
    with emulator.emulated(emulator.sanitized_image(sanitizer), launch.limits_of(["sm_90"])):
        check(CASES["tails"], "double_backward", "float64", [("reverse", 3)])


def test_a_dropped_barrier_is_found_as_a_race() -> None:
    """The tests above can fail: without the barrier after M is made, the warps of a team race for it."""
    build = emulator.sanitized_image("thread")
    spoiled: list[int] = []

    def without_barrier(text: str) -> bytes:
        text, count = re.subn(r"team_barrier\([^)]*\);  // M is complete", "// dropped", text)
        spoiled.append(count)
        return build(text)

    with emulator.emulated(without_barrier), pytest.raises(jax.errors.JaxRuntimeError, match="data race"):
        check(Case("team", "70x1o", "1o", "0e+1e", nodes=9, edges=70), "forward", "float32", [("forward", 3)])
    assert spoiled and all(spoiled)
