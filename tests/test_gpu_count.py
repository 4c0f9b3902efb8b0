"""The GPU tests cover the whole table."""

import subprocess
import sys
from pathlib import Path

from tests._cases import CASES, ODD, ORDERS, PRODUCTS, WORKLOADS

ROOT = Path(__file__).parents[1]


def test_one_gpu_test_for_each_case_dtype_and_order() -> None:
    channelwise = [name for name, row in WORKLOADS["products"].items() if row["mode"] == "uvu"]
    assert [case.name for case in PRODUCTS] == channelwise
    assert len({case.name for case in CASES}) == len(channelwise) + len(ODD)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "tests/gpu/test_gpu_kernels.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    collected = {line for line in run.stdout.splitlines() if "::" in line}
    named = {
        f"tests/gpu/test_gpu_kernels.py::test_case[{case.name}-{order}-{dtype}]"
        for case in CASES
        for order in ORDERS
        for dtype in ("float32", "float64")
    }
    assert collected == named
    assert len(collected) == (len(channelwise) + len(ODD)) * 2 * 3
