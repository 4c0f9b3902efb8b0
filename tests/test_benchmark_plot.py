"""The pictures of a benchmark run: which records count, what the points and ratios are, and that files come out."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jaxcg import TensorProduct
from jaxcg._explain import row_flops

MACE = {"product": "mace-large", "graph": "dhfr", "dtype": "float32"}


@pytest.fixture(scope="module")
def plot() -> Iterator[ModuleType]:
    """`benchmarks/plot.py`; the scripts there import each other by their bare names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
        yield importlib.import_module("plot")


def record(implementation: str, order: str, ms: float, **others: Any) -> dict[str, Any]:
    return MACE | {"implementation": implementation, "order": order, "ms": ms} | others


def run() -> list[dict[str, Any]]:
    """A run with cases that failed, one that was only checked, and one that was timed again."""
    return [
        record("jaxcg", "forward", 9.0),
        record("jaxcg_mul_ir", "forward", 0.25),
        record("oeq", "forward", 1.0),
        MACE | {"graph": "small", "implementation": "oeq_det", "failed": "relative error"},
        {"product": "mace-large", "failed": "out of memory"},
        record("cue", "forward", 0.4, failed="raised after it was timed"),
        MACE | {"implementation": "e3j", "errors": {"forward": 1e-7}},
        record("jaxcg", "forward", 0.2),
        record("jaxcg", "double", 0.8),
        record("a new library", "double", 0.4),
        record("oeq", "backward", 2.0),
        record("jaxcg", "forward", 0.4, dtype="float64"),
        record("jaxcg", "forward", 0.01, graph="small"),
    ]


def test_later_records_replace_earlier_ones_and_failures_are_skipped(plot: ModuleType) -> None:
    times = plot.latest(run())
    assert len(times) == 8
    assert times[plot.Case(*MACE.values(), "jaxcg", "forward")] == 0.2
    assert {case.implementation for case in times} == {"jaxcg", "jaxcg_mul_ir", "oeq", "a new library"}
    # A failure does not take back the time before it.
    again = plot.latest([*run(), MACE | {"implementation": "jaxcg", "order": "forward", "failed": "timeout"}])
    assert again == times


def test_ratios_are_of_the_same_case_and_only_where_ours_was_timed(plot: ModuleType) -> None:
    found = {one.order: one for one in plot.comparisons(plot.latest(run()), "float32")}
    assert set(found) == {"forward", "double"}
    assert found["forward"].ours_ms == 0.2
    assert found["forward"].ratios == pytest.approx({"jaxcg_mul_ir": 1.25, "oeq": 5.0})
    assert found["double"].ratios == pytest.approx({"a new library": 0.5})
    assert plot.comparisons(plot.latest(run()), "float64") == []


def test_points_are_under_the_roof_that_their_floor_says(plot: ModuleType) -> None:
    floor = plot.minimum_bytes(plot.products()["mace-large"], plot.graphs()["dhfr"], "forward", 4)
    found = plot.points(plot.latest(run()), "float32")
    assert [point.case.order for point in found] == ["forward", "double"]
    # Operations a second over operations a byte: the bytes a second, each byte once.
    assert found[0].rate / found[0].intensity == pytest.approx(floor / 0.2e-3)
    assert found[0].rate == pytest.approx(plot.operations(plot.products()["mace-large"], "forward") * 56_000 / 0.2e-3)


def test_operations_of_a_product_of_scalars_by_hand(plot: ModuleType) -> None:
    # 0e x 0e -> 0e with 8 channels: w x, then times y (the coefficient is in it), a multiply-add each.
    scalars = plot.Product("scalars", "8x0e", "0e", "0e")
    assert plot.operations(scalars, "forward") == 2 * 8 * 2


@pytest.mark.parametrize("name", ["mace-large", "nequip-aspirin"])
def test_operations_grow_with_the_order_and_stay_near_the_plain_count(plot: ModuleType, name: str) -> None:
    product = plot.products()[name]
    count = {order: plot.operations(product, order) for order in plot.ORDERS}
    assert count["force_y"] < count["force_xy"] < count["backward"] < count["double"]
    # `explain` counts path by path; kernels share the sum over y.
    plain = row_flops(TensorProduct.channelwise(product.in1, product.in2, product.out))
    assert 0.5 * plain < count["forward"] < 1.2 * plain


def test_a_wide_comparison_goes_on_in_another_picture(plot: ModuleType) -> None:
    found = [plot.Comparison(f"product {n}", "dhfr", order, 1.0, {"oeq": 2.0}) for n in range(40) for order in "ab"]
    pages = plot.pages(found)
    assert len(pages) > 1
    assert [one for page in pages for one in page] == found


def test_files_are_written(plot: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    results = tmp_path / "results.jsonl"
    results.write_text("\n".join(map(json.dumps, run())))
    settings = dict(matplotlib.rcParams)
    monkeypatch.setattr("sys.argv", ["plot.py", str(results), "--output", str(tmp_path / "plots")])
    plot.main()
    assert dict(matplotlib.rcParams) == settings
    files = sorted((tmp_path / "plots").iterdir())
    assert [file.name for file in files] == ["relative-float32.png", "roofline-float32.png", "roofline-float64.png"]
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG")
        assert 1_000 < file.stat().st_size < 300_000


def test_results_without_a_time_are_an_error(
    plot: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(MACE | {"implementation": "jaxcg", "order": "forward", "failed": "no GPU"}))
    monkeypatch.setattr("sys.argv", ["plot.py", str(results), "--output", str(tmp_path / "plots")])
    with pytest.raises(SystemExit):
        plot.main()
    assert "no times of jaxcg" in capsys.readouterr().err
