"""Every case, order and dtype on the GPU, at full multiplicity, output by output against the oracle.

This file holds one test for each of them and nothing else: `test_gpu_count` counts them.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcg import _primitive
from tests._ahead import Ahead, parameters
from tests._cases import CASES, ORDERS, Case, assert_matches, expected, make_arguments, make_call, term_sets
from tests.gpu.conftest import BY_NAME, compile_case

pytestmark = pytest.mark.gpu
DTYPES = ("float32", "float64")

# Captured as a CUDA graph from the second execution on, though it is one command only.
CAPTURED = {"xla_gpu_graph_min_graph_size": 1}

Exact = dict[str, tuple[list[np.ndarray], list[np.ndarray]]]


def _oracle(key: tuple[str, str]) -> Exact:
    case, order = BY_NAME[key[0]], key[1]
    terms = term_sets(case.weighted)[order]
    with jax.default_device(jax.devices("cpu")[0]):
        return {dtype: expected(case, terms, *make_arguments(case, terms, dtype)) for dtype in DTYPES}


@pytest.fixture(scope="module")
def exact(request: pytest.FixtureRequest) -> Iterator[Ahead[tuple[str, str], Exact]]:
    """Results in float64, for the operands of each dtype."""
    keys = [(str(given["name"]), str(given["order"])) for given in parameters(request, "test_case")]
    ahead = Ahead(_oracle, list(dict.fromkeys(keys)), request.config)
    yield ahead
    ahead.close()


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, targets: tuple[str, ...]) -> Iterator[Ahead[tuple[str, str, str], None]]:
    """Images of the kernels."""
    keys = [
        (str(given["name"]), str(given["order"]), str(given["dtype"])) for given in parameters(request, "test_case")
    ]
    ahead = Ahead(lambda key: compile_case(BY_NAME[key[0]], *key[1:], targets), keys, request.config)
    yield ahead
    ahead.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_case(name: str, order: str, dtype: str, compiled: Ahead, exact: Ahead) -> None:
    case: Case = BY_NAME[name]
    compiled((name, order, dtype))
    terms = term_sets(case.weighted)[order]
    indices, operands = make_arguments(case, terms, dtype)
    call = make_call(case, "cuda")
    run = jax.jit(partial(_primitive.apply, call, terms), compiler_options=CAPTURED).lower(indices, operands).compile()
    assert "jaxcg_launch" in run.as_text()
    # Each result is kept, so that none is written where another was.
    results = [run(indices, operands) for _ in range(5)]
    want, sizes = exact((name, order))[dtype]
    for number, result in enumerate(results):
        assert_matches(result, want, sizes, dtype, f"execution {number}")
    for n, out in enumerate(terms.outputs):
        if out.slot != "x":  # sums of x gradients are atomic
            assert all(bool(jnp.array_equal(result[n], results[0][n])) for result in results), f"output {n} varies"
