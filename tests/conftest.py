"""Shared by all tests: double precision, the device that tests run on, options, random keys."""

import os
import zlib
from collections.abc import Iterator

# A GPU test process takes memory as it needs it, so that several can share a device.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
import pytest

# Before any test module makes an array. Tests of single precision pass float32 arrays; a test of what happens with
# x64 off runs a process of its own, or turns it off inside.
jax.config.update("jax_enable_x64", True)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("jaxcg")
    group.addoption("--slow", action="store_true", help="run the tests marked slow too")
    group.addoption("--update-golden", action="store_true", help="write tests/golden anew instead of comparing")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("update_golden") and getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--update-golden writes whole files: run it without -n")


def has_gpu() -> bool:
    """Whether JAX finds an NVIDIA GPU in this process."""
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a marker expression, leave out slow tests, and tests that need a GPU where there is none.

    With ``-m`` nothing is left out: ``-m gpu`` without a GPU fails.
    """
    if config.getoption("markexpr"):
        return
    leave_out = set() if config.getoption("--slow") else {"slow"}
    if any(item.get_closest_marker("gpu") for item in items) and not has_gpu():
        leave_out.add("gpu")
    dropped = [item for item in items if any(item.get_closest_marker(name) for name in leave_out)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[jax.Device]:
    """The device of a test: the GPU for tests marked so, the CPU for all others, wherever they run."""
    chosen = jax.devices("cuda" if request.node.get_closest_marker("gpu") else "cpu")[0]
    with jax.default_device(chosen):
        yield chosen


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number that depends on the test's name alone."""
    return zlib.crc32(request.node.name.encode())


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """NumPy random numbers, the same in every run of a test."""
    return np.random.default_rng(seed)


@pytest.fixture
def key(seed: int) -> jax.Array:
    """JAX random numbers, the same in every run of a test."""
    return jax.random.key(seed)
