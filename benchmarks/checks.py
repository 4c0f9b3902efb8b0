"""What must hold before a time counts: values on a small graph, launches and memory of the compiled program."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from peers import Apply, Convolution, is_ours, jaxcg
from workloads import ORDERS, SLOT, SMALL, Product, operand_shapes

# Relative error of a result, ||out - ref|| / ||ref||. Ours: rounding of sums of some hundred terms, whose errors add
# like a random walk. A peer only has to compute the same function: some keep float32 tables or use fast math.
OWN_TOLERANCE = {"float32": 5e-6, "float64": 1e-14}
PEER_TOLERANCE = 2e-5


def derivative(apply: Apply, order: str) -> Callable[..., tuple[jax.Array, ...]]:
    """The function of an order of differentiation: operands as in ``ORDERS``, then the index arrays."""

    def backward(x: jax.Array, y: jax.Array, w: jax.Array, c: jax.Array, *indices: jax.Array) -> Any:
        return jax.vjp(lambda *operands: apply(*operands, *indices), x, y, w)[1](c)

    def forward(x: jax.Array, y: jax.Array, w: jax.Array, *indices: jax.Array) -> Any:
        return (apply(x, y, w, *indices),)

    def double(x: Any, y: Any, w: Any, c: Any, tx: Any, ty: Any, tw: Any, *indices: jax.Array) -> Any:
        return jax.vjp(lambda *operands: backward(*operands, *indices), x, y, w, c)[1]((tx, ty, tw))

    def force_y(x: jax.Array, y: jax.Array, w: jax.Array, c: jax.Array, *indices: jax.Array) -> Any:
        return jax.vjp(lambda y: apply(x, y, w, *indices), y)[1](c)

    def force_xy(x: jax.Array, y: jax.Array, w: jax.Array, c: jax.Array, *indices: jax.Array) -> Any:
        return jax.vjp(lambda x, y: apply(x, y, w, *indices), x, y)[1](c)

    functions = dict(forward=forward, backward=backward, double=double, force_y=force_y, force_xy=force_xy)
    return functions[order]


class Reference:
    """Every order of one product on the small graph, in float64 by the XLA path, on the CPU."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.convolution = jaxcg(product, "float64", SMALL.nodes, impl="xla")
        rng = np.random.default_rng(0)
        shapes = operand_shapes(product, SMALL)
        # Rounded to float32, so that every dtype sees the same numbers.
        self.operands = {name: rng.standard_normal(shapes[name]).astype(np.float32) for name in SLOT}
        self.indices = SMALL.indices()
        apply = self.convolution.apply

        def everything(operands: dict[str, jax.Array], indices: tuple[jax.Array, ...]) -> Any:
            return {
                order: derivative(apply, order)(*(operands[name] for name in ORDERS[order][0]), *indices)
                for order in ("forward", "backward", "double")
            }

        with jax.default_device(jax.devices("cpu")[0]):
            exact = {name: value.astype(np.float64) for name, value in self.operands.items()}
            results = jax.tree.map(np.asarray, jax.jit(everything)(exact, self.indices))
        x, y, _ = results["backward"]
        self.results: dict[str, tuple[np.ndarray, ...]] = results | {"force_y": (y,), "force_xy": (x, y)}

    def errors(self, convolution: Convolution, dtype: str, orders: Iterable[str]) -> dict[str, float]:
        """Largest relative error of each order, after reordering to the implementation's layout."""
        orders = tuple(orders)
        take = {
            slot: _permutation(self.convolution.labels[slot], labels) for slot, labels in convolution.labels.items()
        }
        indices = convolution.indices(*self.indices)
        native = {
            name: value if SLOT[name] == "y" else value[:, take[SLOT[name]]] for name, value in self.operands.items()
        }
        operands = {name: value.astype(dtype) for name, value in native.items()}
        z = jax.jit(convolution.apply)(operands["x"], operands["y"], operands["w"], *indices)
        factor = _path_factors(np.asarray(z, np.float64), self.results["forward"][0][:, take["z"]], convolution)
        operands["c"] = (native["c"] / factor).astype(dtype)

        def everything(operands: dict[str, jax.Array], indices: tuple[jax.Array, ...]) -> Any:
            return {
                order: derivative(convolution.apply, order)(*(operands[name] for name in ORDERS[order][0]), *indices)
                for order in orders
            }

        results = jax.tree.map(np.asarray, jax.jit(everything)(operands, indices))
        errors: dict[str, float] = {}
        for order in orders:
            worst = 0.0
            for slot, result, expected in zip(ORDERS[order][1], results[order], self.results[order], strict=True):
                expected = expected if slot == "y" else expected[:, take[slot]]
                expected = expected * factor if slot == "z" else expected
                error = float(np.linalg.norm(result.astype(np.float64) - expected) / np.linalg.norm(expected))
                worst = max(worst, error if np.isfinite(error) else np.inf)
            errors[order] = worst
        return errors


def tolerance(name: str, dtype: str) -> float:
    """The largest relative error with which an implementation's time counts."""
    return OWN_TOLERANCE[dtype] if is_ours(name) else PEER_TOLERANCE


def _permutation(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """``p`` with ``source[p] == target``, for two arrays of labels ``[dim, 3]``."""
    found = np.empty(len(target), np.int64)
    found[np.lexsort(target.T)] = np.lexsort(source.T)
    if not np.array_equal(source[found], target):
        raise ValueError("the implementation's paths are not those of the product")
    return found


def _path_factors(z: np.ndarray, expected: np.ndarray, convolution: Convolution) -> np.ndarray:
    """The factor (normalisation and sign) of each path, fitted to the forward result; ours must be exactly 1."""
    factor = np.ones(z.shape[1])
    if is_ours(convolution.name):
        return factor
    for path in np.unique(convolution.labels["z"][:, 0]):
        columns = convolution.labels["z"][:, 0] == path
        factor[columns] = np.sum(z[:, columns] * expected[:, columns]) / np.sum(expected[:, columns] ** 2)
    return factor


def inspect(compiled: Any) -> dict[str, int]:
    """Launches, gathers of floating-point rows, and bytes of temporaries of a compiled program of ours.

    Gathers of indices are allowed; a gather with a floating-point result would be x copied to edges.
    """
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    return {
        "custom_calls": len(re.findall(r'custom_call_target="jaxcg_launch"', text)),
        "float_gathers": len(re.findall(r"= f(?:32|64)\[[\d,]*\]\S* gather\(", text)),
        "temporary_bytes": int(memory.temp_size_in_bytes) if memory else -1,
    }


def excess_memory(temporary: int, product: Product, edges: int, itemsize: int) -> float:
    """Temporaries, less one gradient of w where they hold one, as a share of edges x dim_out x itemsize."""
    gradient = edges * product.dims["w"] * itemsize
    left = temporary - gradient if temporary >= gradient else temporary
    return left / (edges * product.dims["z"] * itemsize)
