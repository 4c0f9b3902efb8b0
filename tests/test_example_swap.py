"""The swap example: energy and forces with `jaxcg.e3nn.convolve` equal those of the layer as it was, to rounding."""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import nequip_swap


def check(result: nequip_swap.Comparison, dtype: type) -> None:
    eps = float(np.finfo(dtype).eps)
    assert result.forces.dtype == result.swapped_forces.dtype == dtype
    # Sums over some 20 neighbours and 50 channels, twice, and their derivative; terms of both signs.
    assert result.energy_error < 50 * eps
    assert result.force_error < 50 * eps
    # The comparison means something: forces are not small, and every atom feels one.
    assert np.abs(result.forces).max() > 1e-2
    assert np.all(np.abs(result.forces).max(axis=1) > 1e-3)


@pytest.mark.slow  # the same in float64 runs by default
def test_float32_is_equal_to_rounding() -> None:
    check(nequip_swap.compare(jnp.float32), jnp.float32)


def test_float64_is_equal_to_rounding_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    result = nequip_swap.main(["--float64"])
    check(result, jnp.float64)
    printed = capsys.readouterr().out
    assert "27 atoms, float64" in printed
    assert f"relative difference of the energies: {result.energy_error:.1e}" in printed
    assert f"over the largest component: {result.force_error:.1e}" in printed


def test_the_swapped_layer_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Half the messages, and only the swapped model changes.
    convolve = nequip_swap.jaxcg.e3nn.convolve
    monkeypatch.setattr(nequip_swap.jaxcg.e3nn, "convolve", lambda *a, **k: convolve(*a, **k) * 0.5)
    assert nequip_swap.compare(jnp.float32, side=2).force_error > 0.05
