"""Pictures of a run, from the JSON lines that convolution.py wrote.

    python benchmarks/plot.py results.jsonl... [--output benchmarks/plots]

Two for each dtype: `roofline-DTYPE.png`, the arithmetic that our kernels achieve beside what memory and multiprocessors
allow, and `relative-DTYPE.png`, the time of every implementation relative to ours, which goes on in
`relative-DTYPE-2.png` where one picture would be too wide. Where a case occurs more than once, the last record counts.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import report
from workloads import COPY_BYTES_PER_SECOND, ORDERS, SMALL, Product, graphs, minimum_bytes, products

# The one place that uses what the library does not make public: its coefficients, term sets and counts of operations.
from jaxcg import TensorProduct
from jaxcg._coupling import couple
from jaxcg._terms import orders, prune
from jaxcg.schedule.cost import count_factors, estimate

try:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from PIL import Image  # matplotlib needs it
except ImportError as error:
    raise ImportError(
        "benchmarks/plot.py draws with matplotlib, which is not installed: pip install 'jaxcg[examples]'"
    ) from error

OURS = "jaxcg"

# Operations a second of one H200. NVIDIA's H200 SXM data sheet, rows without tensor cores, says 67 and 34 TFLOP/s;
# to one digit more: 132 multiprocessors x 128 (or 64) multiply-adds a cycle x 1.98 GHz.
PEAK = {"float32": 66.9e12, "float64": 33.5e12}

MARKERS = dict(zip(ORDERS, "osD^v", strict=True))

# Paul Tol's discrete rainbow of 14 colours, which the colour-blind tell apart; a product has the same in all pictures.
RAINBOW = (
    *("#D1BBD7", "#AE76A3", "#882E72", "#1965B0", "#5289C7", "#7BAFDE", "#4EB265"),
    *("#90C987", "#CAE0AB", "#F7F056", "#F6C141", "#F1932D", "#E8601C", "#DC050C"),
)

# Colour (Okabe and Ito) and hatch of each implementation: a library has one colour, its variants differ by the hatch.
STYLES = {
    "jaxcg_mul_ir": ("#56B4E9", ""),
    "jaxcg_xla": ("#56B4E9", "////"),
    "e3j": ("#009E73", ""),
    "e3j_unfused": ("#009E73", "////"),
    "cue": ("#E69F00", ""),
    "cue_naive": ("#E69F00", "////"),
    "oeq": ("#CC79A7", ""),
    "oeq_det": ("#CC79A7", "////"),
    "e3nn": ("#0072B2", ""),
}
OTHER_STYLE = ("#999999", "")

DPI, PALETTE = 110, 128  # dots an inch, colours of a picture
BAR, GROUP_MARGIN, LEAST_GROUP, LEAST_WIDTH, MOST_WIDTH = 0.24, 0.2, 1.1, 5.0, 20.0  # inches


class Case(NamedTuple):
    """What a time is of."""

    product: str
    graph: str
    dtype: str
    implementation: str
    order: str


@dataclass(frozen=True)
class Point:
    """One of our times in a roofline.

    Attributes:
        case: what was timed.
        intensity: floating-point operations for each byte that must move at least.
        rate: floating-point operations a second.
    """

    case: Case
    intensity: float
    rate: float


@dataclass(frozen=True)
class Comparison:
    """One of our times, and those of others as multiples of it, by implementation."""

    product: str
    graph: str
    order: str
    ours_ms: float
    ratios: dict[str, float]


def latest(records: Iterable[report.Record]) -> dict[Case, float]:
    """The last time of each case in milliseconds, cases in the order in which they first occur."""
    return {
        Case(*(record[field] for field in Case._fields)): record["ms"]
        for record in records
        if "ms" in record and "failed" not in record
    }


@cache
def operations(product: Product, order: str) -> int:
    """Floating-point operations for each edge, a multiply-add counted as two.

    The count is the kernels' own (`jaxcg.schedule.cost`): the Clebsch-Gordan coefficients are first summed over y, once
    for each edge, then each channel works on that sum. The sum over y itself is left out, 0.6 to 2.4 % of forward.
    """
    tp = TensorProduct.channelwise(product.in1, product.in2, product.out)
    known = orders(True)
    if order in known:
        terms = known[order]
    elif order == "double":
        terms = known["double_backward"]
    else:
        wanted = ORDERS[order][1]
        terms, _ = prune(known["backward"], [output.slot in wanted for output in known["backward"].outputs])
    factors = count_factors(terms)
    # As if one lane held all channels of a path: the padding of real lanes is not counted. The size of an item matters
    # for registers and bytes only.
    return sum(2 * estimate((path,), factors, path.mul1, 4).multiply_adds for path in couple(tp).paths)


def points(times: dict[Case, float], dtype: str) -> list[Point]:
    """Our times of a dtype as points of a roofline; the graph to try the plumbing with is left out."""
    found: list[Point] = []
    for case, ms in times.items():
        if case.implementation == OURS and case.dtype == dtype and case.graph != SMALL.name:
            product, graph = products()[case.product], graphs()[case.graph]
            count = operations(product, case.order) * graph.edges
            moved = minimum_bytes(product, graph, case.order, np.dtype(dtype).itemsize)
            found.append(Point(case, count / moved, count / ms * 1e3))
    return found


def comparisons(times: dict[Case, float], dtype: str) -> list[Comparison]:
    """Every case of a dtype that ours and at least one other implementation were timed in."""
    ratios: dict[Case, dict[str, float]] = {}
    for case, ms in times.items():
        ours = case._replace(implementation=OURS)
        if case != ours and case.dtype == dtype and ours in times:
            ratios.setdefault(ours, {})[case.implementation] = ms / times[ours]
    return [Comparison(ours.product, ours.graph, ours.order, times[ours], others) for ours, others in ratios.items()]


def roofline(found: list[Point], dtype: str) -> Figure:
    """Operations a second over operations a byte: a marker for each order, a colour for each product."""
    figure = Figure(figsize=(9.5, 5.8), layout="constrained")
    axes = figure.add_subplot()
    ridge = PEAK[dtype] / COPY_BYTES_PER_SECOND
    left = min(ridge, *(point.intensity for point in found)) / 1.6
    right = max(3 * ridge, 1.6 * max(point.intensity for point in found))
    axes.plot([left, ridge], [left * COPY_BYTES_PER_SECOND / 1e12, PEAK[dtype] / 1e12], color="0.2", linewidth=1.3)
    axes.plot([ridge, right], [PEAK[dtype] / 1e12] * 2, color="0.2", linewidth=1.3, linestyle="--")
    colours = dict(zip(products(), RAINBOW, strict=False))
    for point in found:
        style = dict(marker=MARKERS[point.case.order], markersize=7.5, markeredgecolor="0.2", markeredgewidth=0.6)
        colour = colours.get(point.case.product, OTHER_STYLE[0])
        axes.plot(point.intensity, point.rate / 1e12, linestyle="none", markerfacecolor=colour, **style)
    lowest = min(left * COPY_BYTES_PER_SECOND, *(point.rate for point in found)) / 1e12
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(lowest / 1.4, PEAK[dtype] / 1e12 * 1.6))
    _label_roof(axes, dtype, left, right, ridge)
    axes.set_xlabel("arithmetic intensity (floating-point operations / minimum bytes)")
    axes.set_ylabel("achieved TFLOP/s")
    names = list(dict.fromkeys(point.case.graph for point in found))
    axes.set_title(
        f"{OURS}, {dtype}, graph{'s' if len(names) > 1 else ''} {', '.join(names)}; roof of one H200", fontsize=11
    )
    _plain_ticks(axes.xaxis, axes.get_xlim())
    _plain_ticks(axes.yaxis, axes.get_ylim())
    axes.grid(color="0.9", linewidth=0.6)
    seen_orders = [order for order in ORDERS if any(point.case.order == order for point in found)]
    seen_products = [name for name in products() if any(point.case.product == name for point in found)]
    edge = dict(linestyle="none", markeredgecolor="0.2", markeredgewidth=0.6, markersize=7.5)
    shapes = [Line2D([], [], marker=MARKERS[o], markerfacecolor="white", label=o, **edge) for o in seen_orders]
    fills = [
        Line2D([], [], marker="o", markerfacecolor=colours.get(p, OTHER_STYLE[0]), label=p, **edge)
        for p in seen_products
    ]
    legend = dict(frameon=False, fontsize=9, loc="outside right upper", alignment="left")
    figure.legend(handles=[*shapes, Line2D([], [], linestyle="none", label=" "), *fills], **legend)
    return figure


def _label_roof(axes: Axes, dtype: str, left: float, right: float, ridge: float) -> None:
    middle, slope = (left * ridge) ** 0.5, COPY_BYTES_PER_SECOND / 1e12
    memory = f"memory: {slope:g} TB/s (rate of a copy)"
    along = dict(rotation=np.degrees(np.arctan(slope)), rotation_mode="anchor", transform_rotates_text=True)
    axes.text(middle, 1.05 * slope * middle, memory, ha="center", va="bottom", fontsize=9, **along)
    peak = f"peak {dtype}, no tensor cores: {PEAK[dtype] / 1e12:g} TFLOP/s"
    place = (right, PEAK[dtype] / 1e12)
    axes.annotate(peak, place, (-4, 4), textcoords="offset points", ha="right", va="bottom", fontsize=9)


def _plain_ticks(axis: Axis, limits: tuple[float, float]) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5 times powers of ten, or these alone on a long one, as plain numbers."""
    low, high = limits
    steps = (1, 2, 5) if high / low < 300 else (1,)
    decades = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)))
    axis.set_ticks([tick for tick in np.outer(decades, steps).ravel() if low <= tick <= high])
    axis.set_ticks([], minor=True)
    axis.set_major_formatter("{x:g}")


def _names(found: list[Comparison]) -> list[str]:
    """The implementations that ours is compared with, in the order of their bars."""
    seen = {name for one in found for name in one.ratios}
    return [name for name in STYLES if name in seen] + sorted(seen - set(STYLES))


def _pitch(names: list[str]) -> float:
    """Inches that a group of bars takes."""
    return max(LEAST_GROUP, BAR * len(names) + GROUP_MARGIN)


def _with_margins(low: float, high: float) -> tuple[float, float]:
    """Limits of a logarithmic axis that leave a bar's number a quarter of the height, above and, if needed, below."""
    below, above = (0.25 if low < 1 else 0.1), 0.25
    span = np.log(high / low) / (1 - below - above)
    return low / np.exp(below * span), high * np.exp(above * span)


def pages(found: list[Comparison]) -> list[list[Comparison]]:
    """The comparisons of each picture: whole groups, as many as stay legible side by side."""
    groups = list(dict.fromkeys((one.product, one.graph) for one in found))
    most = int(MOST_WIDTH / _pitch(_names(found)))
    chosen = [set(groups[start : start + most]) for start in range(0, len(groups), most)]
    return [[one for one in found if (one.product, one.graph) in page] for page in chosen]


def relative(found: list[Comparison], dtype: str) -> Figure:
    """Bars of every implementation's time over ours: a group for each product and graph, a row for each order."""
    seen_orders = [order for order in ORDERS if any(one.order == order for one in found)]
    groups = {where: number for number, where in enumerate(dict.fromkeys((one.product, one.graph) for one in found))}
    names = _names(found)
    pitch = _pitch(names)
    size = (max(LEAST_WIDTH, pitch * len(groups) + 1.0), 2.2 * len(seen_orders) + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    rows = figure.subplots(len(seen_orders), 1, sharey=True, squeeze=False)[:, 0]
    width = BAR / pitch
    ratios = [ratio for one in found for ratio in one.ratios.values()]
    limits = _with_margins(min(1.0, *ratios), max(1.5, *ratios))
    for axes, order in zip(rows, seen_orders, strict=True):
        labels = ["\n".join((*where, "-")) for where in groups]
        for one in (one for one in found if one.order == order):
            group = groups[one.product, one.graph]
            labels[group] = f"{one.product}\n{one.graph}\n{one.ours_ms:.3f} ms"
            for name, ratio in one.ratios.items():
                place = group + (names.index(name) - (len(names) - 1) / 2) * width
                colour, hatch = STYLES.get(name, OTHER_STYLE)
                style = dict(color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
                axes.bar(place, ratio - 1, width, bottom=1, **style)
                above = ratio >= 1
                axes.annotate(
                    f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}",
                    (place, ratio),
                    (0, 2 if above else -2),
                    textcoords="offset points",
                    ha="center",
                    va="bottom" if above else "top",
                    rotation=90,
                    fontsize=7.5,
                )
        axes.axhline(1, color="black", linewidth=1)
        axes.set(yscale="log", ylim=limits, xlim=(-0.5, len(groups) - 0.5))
        _plain_ticks(axes.yaxis, limits)
        axes.set_xticks(range(len(groups)), labels, fontsize=8)
        axes.tick_params(axis="x", length=0)
        axes.set_ylabel(f"{order}\ntime / ours")
        axes.grid(axis="y", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.suptitle(f"{dtype}: time / time of {OURS}\n(that of {OURS} below each group)", fontsize=11)
    handles = []
    for name in names:
        colour, hatch = STYLES.get(name, OTHER_STYLE)
        handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name))
    handles.append(Line2D([], [], color="black", linewidth=1, label=OURS))
    columns = max(1, min(len(handles), int(size[0] / 1.3)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def write(records: Iterable[report.Record], folder: Path) -> list[Path]:
    """Draws everything that the records have times for; returns the files written."""
    times = latest(records)
    figures: dict[str, Figure] = {}
    for dtype in PEAK:
        if own := points(times, dtype):
            figures[f"roofline-{dtype}.png"] = roofline(own, dtype)
        for number, page in enumerate(pages(comparisons(times, dtype)), start=1):
            figures[f"relative-{dtype}{'' if number == 1 else f'-{number}'}.png"] = relative(page, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        # Agg and nothing else, whatever backend is configured; a palette, since few colours need a third of the bytes.
        figure.set_dpi(DPI)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        picture.quantize(PALETTE).save(folder / name, optimize=True)
    return [folder / name for name in figures]


def main() -> None:
    """Draws what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files of JSON lines; a later one replaces an earlier's")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/plots"), help="folder for the pictures")
    arguments = parser.parse_args()
    written = write([record for path in arguments.results for record in report.read(path)], arguments.output)
    if not written:
        parser.error(f"no times of {OURS} in these files")
    for path in written:
        print(path)


if __name__ == "__main__":
    main()
