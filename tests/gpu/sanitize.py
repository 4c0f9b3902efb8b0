"""A few small kernels, to be run under compute-sanitizer, which a whole test run would keep for hours.

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.gpu.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.gpu.sanitize

Tails, vector accesses, cut and empty receivers, absent edges; three orders, both dtypes. Every output is compared.
"""

import os
from dataclasses import replace
from functools import partial

# The sanitizer cannot see accesses within one block of a pool.
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

from jaxcg import _primitive
from tests._cases import Case, assert_matches, expected, make_arguments, make_call, term_sets

jax.config.update("jax_enable_x64", True)
TAILS = Case("tails", "5x0e+33x1o", "0e+1o", "0e+1o", nodes=9, edges=70)
SMALL = (
    TAILS,
    replace(TAILS, name="tails-ir_mul", layout="ir_mul"),
    replace(TAILS, name="rows", indexed=False, edges=9),
    Case("vector-access", "64x0e+128x1o", "0e+1o", "0e+1o", layout="ir_mul", graph="sorted", nodes=9, edges=70),
    Case("one-receiver", "3x0e+2x1o", "0e+1o", "0e+1o", graph="star", nodes=9, edges=70),
)


def main() -> None:
    """Run all of them; an error stops the script."""
    for case in SMALL:
        for order, terms in term_sets(case.weighted).items():
            for dtype in ("float32", "float64"):
                indices, operands = make_arguments(case, terms, dtype)
                results = jax.jit(partial(_primitive.apply, make_call(case, "cuda"), terms))(indices, operands)
                assert_matches(results, *expected(case, terms, indices, operands), dtype, case.name)
                print(f"{case.name} {order} {dtype}: right", flush=True)


if __name__ == "__main__":
    main()
