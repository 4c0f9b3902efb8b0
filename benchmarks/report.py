"""The table of a run, from the JSON lines that convolution.py wrote.

python benchmarks/report.py results.jsonl            # Markdown
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from checks import excess_memory
from peers import is_ours
from workloads import ORDERS, graphs, products

Record = dict[str, Any]
HEADER = ("product", "graph", "dtype", "order", "ours ms", "floor %", "best peer ms", "peer", "peer / ours")
MEMORY_LIMIT = 0.05


def read(path: Path) -> list[Record]:
    """All records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _cases(records: Iterable[Record]) -> dict[tuple[str, str, str, str], dict[str, Record]]:
    cases: dict[tuple[str, str, str, str], dict[str, Record]] = defaultdict(dict)
    for record in records:
        if "ms" in record:
            key = (record["product"], record["graph"], record["dtype"], record["order"])
            cases[key][record["implementation"]] = record
    return cases


def rows(records: list[Record]) -> list[tuple[str, ...]]:
    """One row for each case that ours was timed in: each of our variants against the fastest peer."""
    table: list[tuple[str, ...]] = []
    for key, found in _cases(records).items():
        peers = [record for name, record in found.items() if not is_ours(name)]
        best = min(peers, key=lambda record: record["ms"]) if peers else None
        for name, record in found.items():
            if not is_ours(name):
                continue
            product = key[0] if name == "jaxcg" else f"{key[0]} ({name.removeprefix('jaxcg_')})"
            row = (product, *key[1:], f"{record['ms']:.4f}", f"{100 * record['floor_ms'] / record['ms']:.0f}")
            if best is None:
                table.append((*row, "-", "-", "-"))
            else:
                table.append((*row, f"{best['ms']:.4f}", best["implementation"], f"{best['ms'] / record['ms']:.2f}"))
    return table


def ratios(records: list[Record]) -> list[str]:
    """Geometric mean and worst of peer / ours, and of the share of the floor, for each dtype and order."""
    groups: dict[tuple[str, str, str], list[tuple[float, str]]] = defaultdict(list)
    shares: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for (product, graph, dtype, order), found in _cases(records).items():
        peers = [record["ms"] for name, record in found.items() if not is_ours(name)]
        for name, record in found.items():
            if is_ours(name):
                shares[name, dtype, order].append(record["floor_ms"] / record["ms"])
                if peers:
                    groups[name, dtype, order].append((min(peers) / record["ms"], f"{product} {graph}"))
    lines: list[str] = []
    for key, share in shares.items():
        line = f"{' '.join(key)}: floor share {100 * np.exp(np.mean(np.log(share))):.0f} % ({len(share)} cases)"
        if groups[key]:
            values = [ratio for ratio, _ in groups[key]]
            worst, where = min(groups[key])
            line += f"; peer / ours: geometric mean {np.exp(np.mean(np.log(values))):.2f}, worst {worst:.2f} ({where})"
        lines.append(line)
    return lines


def findings(records: list[Record]) -> list[str]:
    """Launches, gathers and memory of our programs, then everything that failed."""
    ours = [record for record in records if "custom_calls" in record]
    lines: list[str] = []
    for order in ORDERS:
        chosen = [record for record in ours if record["order"] == order]
        if chosen:
            calls = sorted({record["custom_calls"] for record in chosen})
            gathers = max(record["float_gathers"] for record in chosen)
            lines.append(f"{order}: custom calls {calls}, floating-point gathers {gathers} ({len(chosen)} programs)")
    for record in ours:
        if (record["product"], record["graph"]) == ("mace-large", "dhfr"):
            itemsize = int(record["dtype"].removeprefix("float")) // 8
            edges = graphs()["dhfr"].edges
            share = excess_memory(record["temporary_bytes"], products()["mace-large"], edges, itemsize)
            verdict = "ok" if share < MEMORY_LIMIT else "TOO MUCH"
            lines.append(
                f"temporaries mace-large dhfr {record['implementation']} {record['dtype']} {record['order']}: "
                f"{record['temporary_bytes'] / 1e6:.1f} MB, {100 * share:.2f} % of edges x dim_out: {verdict}"
            )
    checks = sorted(r["dispatched_ms"] / r["ms"] for r in ours if r.get("dispatched_ms") and r["dispatched_ms"] > 0.15)
    if checks:
        middle = checks[len(checks) // 2]
        lines.append(
            f"plain calls over 0.15 ms / calls in the loop: {checks[0]:.3f} to {checks[-1]:.3f}, median {middle:.3f}"
        )
    copying = {record["implementation"] for record in records if record.get("loop_copies")}
    if copying:
        lines.append(f"copies as large as an operand in the loops of: {', '.join(sorted(copying))}")
    for record in records:
        keys = ("product", "graph", "dtype", "implementation", "order")
        case = " ".join(str(record[key]) for key in keys if key in record)
        if "failed" in record:
            lines.append(f"FAILED {case}: {record['failed']}")
        elif record.get("faults"):
            lines.append(f"SUSPECT {case}: {'; '.join(record['faults'])}")
    return lines


def text(records: list[Record]) -> str:
    """The short table of a terminal: in each cell ms, share of the floor, and how many times faster than the peers."""
    cases = _cases(records)
    orders = [order for order in ORDERS if any(key[-1] == order for key in cases)]
    cells: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for (product, graph, dtype, order), found in cases.items():
        peers = [record["ms"] for name, record in found.items() if not is_ours(name)]
        for name, record in found.items():
            if is_ours(name):
                ratio = f"x{min(peers) / record['ms']:.2f}" if peers else ""
                cell = f"{record['ms']:.3f} {100 * record['floor_ms'] / record['ms']:.0f}% {ratio}"
                cells[product, graph, dtype, name][order] = cell
    table = [("product", "graph", "dtype", "variant", *orders)]
    table += [(*key, *(row.get(order, "-") for order in orders)) for key, row in cells.items()]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([*findings(records), "", *lines, "", *ratios(records)])


def markdown(records: list[Record]) -> str:
    """The same as a Markdown table."""
    table = [HEADER, ("---",) * len(HEADER), *rows(records)]
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([*lines, "", *(f"- {line}" for line in [*ratios(records), *findings(records)])])


if __name__ == "__main__":
    print(markdown([record for path in sys.argv[1:] for record in read(Path(path))]))
