"""The swap example: energy and forces with `jaxcg.e3nn.convolve` equal those of the layer as it was, to rounding."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import nequip_swap  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def float64() -> Iterator[None]:
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64], ids=["float32", "float64"])
def test_energy_and_forces_are_equal_to_rounding(dtype: type) -> None:
    result = nequip_swap.compare(dtype)
    eps = float(np.finfo(dtype).eps)
    assert result.forces.dtype == result.swapped_forces.dtype == dtype
    # Sums over some 20 neighbours and 50 channels, twice, and their derivative; terms of both signs.
    assert result.energy_error < 50 * eps
    assert result.force_error < 50 * eps
    # The comparison means something: forces are not small, and every atom feels one.
    assert np.abs(result.forces).max() > 1e-2
    assert np.all(np.abs(result.forces).max(axis=1) > 1e-3)


def test_the_command_prints_the_differences() -> None:
    command = [sys.executable, str(EXAMPLES / "nequip_swap.py"), "--side", "2", "--float64"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    assert "8 atoms, float64" in output
    assert "relative difference of the energies" in output
    assert "largest difference of a force component" in output
