"""Several devices: `shard_map` with its checks on, `pmap`, and sharded arguments of `jit`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.transforms import _two_devices


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """What each check found, all of them in one process with two devices."""
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, "-m", "tests.transforms._two_devices"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", _two_devices.CHECKS)
def test_on_two_devices(name: str, found: dict[str, str]) -> None:
    assert found[name] == "", found[name]
