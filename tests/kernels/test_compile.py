"""Every kernel of every product at full multiplicity, compiled by NVRTC: registers, spills, launches.

float32 for sm_90 by default, float64, sm_80 and sm_100 for a few products; all of them, and the largest products, whose
kernels take long, with ``--slow`` (ten more minutes).
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxcg._errors import MissingLibraryError
from jaxcg.codegen import KernelSource
from jaxcg.codegen.generate import prelude
from jaxcg.runtime import launch, nvrtc
from jaxcg.schedule import DeviceLimits
from tests._ahead import Ahead, parameters
from tests._cases import LONG, ODD, ORDERS, PRODUCTS, make_call, term_sets

TARGETS = nvrtc.EXPORT_TARGETS
CASES = {case.name: case for case in PRODUCTS}
# In float64 and on the other architectures too: with vector accesses, and many paths.
EVERYWHERE = ("mace-first", "sevennet-0-first", "nequip-water")
# Of all kernels of a call together, whatever the compiler's version.
MOST_SPILLED = 2048
SPILLS = Path(__file__).parents[1] / "golden" / "spills.json"

Key = tuple[str, str, str, str]


def source_of(name: str, order: str, dtype: str, limits: DeviceLimits) -> KernelSource:
    case = CASES[name]
    return launch.kernel_source(make_call(case), term_sets(case.weighted)[order], np.dtype(dtype).itemsize, limits)


def compile_key(key: Key) -> tuple[KernelSource, nvrtc.CompiledImage]:
    name, order, dtype, target = key
    source = source_of(name, order, dtype, launch.limits_of([target]))
    return source, nvrtc.compile_source(source.text, target)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Ahead]:
    """Source and image of a kernel."""
    keys = [
        tuple(str(given[name]) for name in ("name", "order", "dtype", "target"))
        for given in parameters(request, "test_compiles")
    ]
    ahead = Ahead(compile_key, keys, request.config)
    yield ahead
    ahead.close()


@pytest.fixture(scope="module")
def spills(request: pytest.FixtureRequest) -> Iterator[dict[str, int] | None]:
    """Bytes that kernels may spill, by what they are, 0 for those left out; None for another compiler's registers."""
    compiler = ".".join(map(str, nvrtc.version()))
    update = request.config.getoption("update_golden")
    kept = json.loads(SPILLS.read_text()) if SPILLS.exists() else {"nvrtc": compiler, "bytes": {}}
    if kept["nvrtc"] != compiler and not update:
        yield None
        return
    yield kept["bytes"]
    if update:
        table = {key: kept["bytes"][key] for key in sorted(kept["bytes"]) if kept["bytes"][key]}
        SPILLS.write_text(json.dumps({"nvrtc": compiler, "bytes": table}, indent=1) + "\n")


def every_key() -> Iterator[object]:
    for name in CASES:
        for order in ORDERS:
            for dtype in ("float32", "float64"):
                for target in TARGETS:
                    slow = name in LONG
                    slow |= (dtype, target) != ("float32", "sm_90") and name not in EVERYWHERE
                    slow |= dtype == "float64" and target != "sm_90"
                    yield pytest.param(name, order, dtype, target, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("name, order, dtype, target", every_key())
def test_compiles(
    name: str, order: str, dtype: str, target: str, compiled: Ahead, spills: dict[str, int] | None,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    source, image = compiled((name, order, dtype, target))
    assert image.target == target and image.image[:4] == b"\x7fELF"
    reports = {report.name: report for report in image.reports}
    assert set(reports) == {one.name for one in source.launches}
    for one in source.launches:
        report = reports[one.name]
        assert one.threads % 32 == 0 and 0 < one.threads <= 1024
        assert 0 <= one.shared_bytes <= launch.limits_of([target]).shared_bytes
        # A block must fit the 65536 registers of a multiprocessor, handed out in units of 8 a thread.
        assert report.registers <= 255
        assert one.threads * (-(-report.registers // 8) * 8) <= 65536
    spilled = sum(report.spill_stores + report.spill_loads for report in image.reports)
    assert spilled <= MOST_SPILLED
    if spills is None:
        return
    key = f"{name} {order} {dtype} {target}"
    if request.config.getoption("update_golden"):
        spills[key] = spilled
    assert spilled <= spills.get(key, 0), f"{key} spills {spilled} bytes; if that is right, run with --update-golden"


@pytest.mark.parametrize("shared", [48, 64, 99], ids=lambda size: f"{size}K")
@pytest.mark.parametrize("name", CASES)
def test_devices_with_less_shared_memory(name: str, shared: int) -> None:
    """Every order and dtype has a schedule that fits, never an error."""
    limits = DeviceLimits(shared_bytes=1024 * shared, shared_total=1024 * (shared + 1))
    for order in ORDERS:
        for dtype in ("float32", "float64"):
            source = source_of(name, order, dtype, limits)
            assert max(one.shared_bytes for one in source.launches) <= 1024 * shared
            assert all(one.threads <= 1024 for one in source.launches)


@pytest.mark.parametrize("order", ORDERS)
def test_little_shared_memory_compiles(order: str) -> None:
    limits = DeviceLimits(shared_bytes=48 * 1024, shared_total=49 * 1024)
    image = nvrtc.compile_source(source_of("nequix-main", order, "float32", limits).text, "sm_80")
    assert image.image


def test_the_unroll_of_odd_cases_compiles() -> None:
    """The texts that no product has: multiplicity 1, wide tails, rows without graph, no weights."""
    for case in ODD:
        if case.name in ("mul-1", "mul-130", "plain-product", "plain-product-unweighted", "unweighted", "l5"):
            source = launch.kernel_source(make_call(case), term_sets(case.weighted)["backward"], 4, DeviceLimits())
            assert nvrtc.compile_source(source.text, "sm_80").image


def test_size_of_texts_is_linear_in_coefficients() -> None:
    """No product is blown up by unrolling: bytes of text for each coefficient and path, beside the fixed code."""
    for name, case in CASES.items():
        paths = make_call(case).coupling.paths
        coefficients = sum(len(path.entries) for path in paths)
        for order, each in zip(ORDERS, (150, 250, 750), strict=True):
            size = len(source_of(name, order, "float32", DeviceLimits()).text) - len(prelude())
            assert size < 15_900 + each * coefficients + 3_000 * len(paths), (name, order, size)


def test_nvrtc_is_there() -> None:
    try:
        assert set(TARGETS) <= {f"sm_{architecture}" for architecture in nvrtc.supported_architectures()}
    except MissingLibraryError as error:  # the extra `test` brings it
        pytest.fail(str(error))
