"""Several devices: `shard_map` with its checks on, `pmap`, and sharded arguments of `jit`."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.transforms import _two_devices


def test_on_two_devices() -> None:
    # One process for all checks: it has two devices, which this one can no longer get.
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
    found = json.loads(done.stdout)
    assert list(found) == list(_two_devices.CHECKS)
    failed = {name: trace for name, trace in found.items() if trace}
    assert not failed, "\n".join(f"{name}: {trace}" for name, trace in failed.items())
