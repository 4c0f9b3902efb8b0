"""Shared by the tests on a GPU: memory full of NaN, images compiled ahead."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcg.runtime import cache, launch, nvrtc
from tests._cases import CASES, Case, make_call, term_sets

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(autouse=True)
def poisoned_memory(device: jax.Device) -> None:
    """Fill what the allocator has free with NaN, in blocks of all sizes, so that a result nobody writes shows."""
    if device.platform != "gpu":
        return
    held = [jnp.full(1 << size, np.nan, jnp.float32) for size in range(8, 27) for _ in range(3)]
    jax.block_until_ready(held)
    for array in held:
        array.delete()


@pytest.fixture(scope="session")
def targets() -> tuple[str, ...]:
    """What NVRTC compiles for on this machine."""
    return nvrtc.targets(sorted({device.compute_capability for device in jax.devices("cuda")}))


def compile_case(case: Case, order: str, dtype: str, targets: tuple[str, ...]) -> None:
    """Leave the image of a case where the lowering finds it."""
    terms, itemsize = term_sets(case.weighted)[order], np.dtype(dtype).itemsize
    source = launch.kernel_source(make_call(case, "cuda"), terms, itemsize, launch.limits_of(targets))
    for target in targets:
        cache.compile_cached(source.text, target)


@pytest.fixture(autouse=True, scope="module")
def cpu_is_there() -> Iterator[None]:
    """The oracle runs on the CPU, which JAX_PLATFORMS=cuda would hide."""
    assert jax.devices("cpu"), "set JAX_PLATFORMS=cuda,cpu or leave it unset"
    yield
