"""These tests compile many programs and run each on a few rows: compilation is nearly all of their time."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    """XLA without its costly passes: 2 to 3 times faster here, and no test in this folder is about speed."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
