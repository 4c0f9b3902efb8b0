"""What is measured: products, graphs, operands, and the fewest bytes each operation must move."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import e3nn_jax as e3nn
import numpy as np

WORKLOADS = Path(__file__).resolve().parent.parent / "tests" / "workloads.json"

# Device-to-device copy rate measured on one H200, counting bytes read and written. A floor is "each byte once" at it.
COPY_BYTES_PER_SECOND = 4.3e12

# What is differentiated: name -> (operands of the call, results). `c` is the cotangent of z; tx, ty and tw are the
# cotangents of the three gradients. A result is named by the slot whose shape and layout it has.
ORDERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "forward": (("x", "y", "w"), ("z",)),
    "backward": (("x", "y", "w", "c"), ("x", "y", "w")),
    "double": (("x", "y", "w", "c", "tx", "ty", "tw"), ("x", "y", "w", "z")),
    "force_y": (("x", "y", "w", "c"), ("y",)),
    "force_xy": (("x", "y", "w", "c"), ("x", "y")),
}
SLOT = {"x": "x", "y": "y", "w": "w", "c": "z", "tx": "x", "ty": "y", "tw": "w"}

# How often each array crosses device memory at least, as multiples of its size, inputs and results together.
TRAFFIC: dict[str, dict[str, int]] = {
    "forward": {"x": 1, "y": 1, "w": 1, "z": 1},
    "backward": {"x": 2, "y": 2, "w": 2, "z": 1},
    "double": {"x": 3, "y": 3, "w": 3, "z": 2},
    "force_y": {"x": 1, "y": 1, "w": 1, "z": 1},
    "force_xy": {"x": 2, "y": 2, "w": 1, "z": 1},
}


@dataclass(frozen=True)
class Product:
    """One channelwise product: node features, edge features, and the output irreps that are kept."""

    name: str
    in1: str
    in2: str
    out: str

    @cached_property
    def paths(self) -> tuple[tuple[int, int, e3nn.Irrep, int], ...]:
        """(block of in1, block of in2, output irrep, multiplicity), in the order of the nested loop over them."""
        in1, in2 = e3nn.Irreps(self.in1), e3nn.Irreps(self.in2)
        kept = {term.ir for term in e3nn.Irreps(self.out)}
        return tuple(
            (first, second, ir, mul)
            for first, (mul, ir1) in enumerate(in1)
            for second, (_, ir2) in enumerate(in2)
            for ir in ir1 * ir2
            if ir in kept
        )

    @property
    def dims(self) -> dict[str, int]:
        """Row length of x, y, w and z."""
        return {
            "x": e3nn.Irreps(self.in1).dim,
            "y": e3nn.Irreps(self.in2).dim,
            "w": sum(mul for *_, mul in self.paths),
            "z": sum(mul * ir.dim for _, _, ir, mul in self.paths),
        }


@dataclass(frozen=True)
class Graph:
    """Edges sorted by receiver, then by sender, as OpenEquivariance's deterministic mode wants them.

    Senders lie in a band around the receiver, as in a spatially ordered system.
    """

    name: str
    nodes: int
    edges: int

    def indices(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Returns senders and receivers, int32 ``[edges]``; the last nodes of a small graph receive nothing."""
        rng = np.random.default_rng(seed)
        receiving = self.nodes if self.edges > 10_000 else max(1, self.nodes - 3)
        receivers = np.sort(rng.integers(0, receiving, self.edges))
        band = max(2, min(self.nodes // 2, 4 * self.edges // self.nodes))
        distance = rng.integers(1, band, self.edges) * rng.choice([-1, 1], self.edges)
        senders = (receivers + distance) % self.nodes
        order = np.lexsort((senders, receivers))
        return senders[order].astype(np.int32), receivers[order].astype(np.int32)


SMALL = Graph("small", 23, 180)


def products() -> dict[str, Product]:
    """The channelwise (uvu) rows of the table of workloads."""
    table = json.loads(WORKLOADS.read_text())["products"]
    return {
        name: Product(name, row["in1"], row["in2"], row["out"]) for name, row in table.items() if row["mode"] == "uvu"
    }


def graphs() -> dict[str, Graph]:
    """The graphs of the table of workloads, and a small one to try the plumbing."""
    table = json.loads(WORKLOADS.read_text())["graphs"]
    found = {name: Graph(name, row["nodes"], row["edges"]) for name, row in table.items() if name != "comment"}
    return found | {"small": SMALL}


def reduced(product: Product, divisor: int = 16) -> Product:
    """The same product with every multiplicity divided, to try the plumbing on a CPU."""
    in1 = "+".join(f"{max(1, mul // divisor)}x{ir}" for mul, ir in e3nn.Irreps(product.in1))
    return Product(product.name, in1, product.in2, product.out)


def operand_shapes(product: Product, graph: Graph) -> dict[str, tuple[int, int]]:
    """Shapes of x, y, w, z and of everything shaped like them."""
    rows = {"x": graph.nodes, "y": graph.edges, "w": graph.edges, "z": graph.nodes}
    slots = {slot: (rows[slot], dim) for slot, dim in product.dims.items()}
    return slots | {name: slots[slot] for name, slot in SLOT.items()}


def minimum_bytes(product: Product, graph: Graph, order: str, itemsize: int) -> int:
    """Bytes of every input read once and every result written once."""
    shapes = operand_shapes(product, graph)
    return sum(times * int(np.prod(shapes[slot])) for slot, times in TRAFFIC[order].items()) * itemsize


def floor_ms(product: Product, graph: Graph, order: str, itemsize: int) -> float:
    """Milliseconds that ``minimum_bytes`` take at the measured copy rate."""
    return minimum_bytes(product, graph, order, itemsize) / COPY_BYTES_PER_SECOND * 1e3
