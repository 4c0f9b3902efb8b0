"""These tests compile many programs and run each on a few rows: compilation is nearly all of their time."""

from collections.abc import Iterator

import pytest

from tests._oracle import quick_compilation


@pytest.fixture(scope="module", autouse=True)
def compile_quickly() -> Iterator[None]:
    with quick_compilation():
        yield
