"""The two operations of a `TensorProduct`, with their checks: all errors of use are raised here, at trace time."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxcg import _terms
from jaxcg._coupling import Coupling
from jaxcg._errors import DtypeError, GraphError, OptionError, ShapeError, UnsupportedError
from jaxcg._primitive import Call, apply, resolve
from jaxcg._problem import TensorProduct

IMPLEMENTATIONS = ("auto", "cuda", "xla")
_LARGEST_INDEX = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EdgeOrder:
    """An order of edges that sorts them by receiver, made once and reused by every step on the same graph.

    Attributes:
        by_receiver: ``[num_edges]`` int32, edge numbers in ascending order of receiver (stable).
    """

    by_receiver: Int[Array, " edge"]


def sort_edges(senders: Int[Array, " edge"], receivers: Int[Array, " edge"], num_nodes: int) -> EdgeOrder:
    """Order edges by receiver.

    The kernels sum onto each receiver once, which needs the edges of a receiver to follow each other. They read
    edge e through this order, so no per-edge array is moved in memory.

    Args:
        senders: ``[num_edges]`` integers.
        receivers: ``[num_edges]`` integers; an edge out of ``[0, num_nodes)`` is absent, wherever it is sorted to.
        num_nodes: number of receiving nodes.

    Returns:
        The order, valid for these indices whatever the features. Not differentiable, cheap to keep.

    Raises:
        GraphError: the index arrays are not integer vectors of one length.

    Example:
        >>> import jax.numpy as jnp
        >>> sort_edges(jnp.array([0, 1, 0]), jnp.array([2, 0, 1]), 3).by_receiver
        Array([1, 2, 0], dtype=int32)
    """
    _check_graph(senders, receivers, num_nodes)
    del senders
    receivers = jnp.clip(_as_index(receivers), 0, max(num_nodes - 1, 0))
    return EdgeOrder(jnp.argsort(receivers, stable=True).astype(jnp.int32))


def path_taken(
    tp: TensorProduct, *, convolution: bool = True, impl: str = "auto", platform: str | None = None
) -> Literal["cuda", "xla"]:
    """Which path a call takes: generated kernels (``"cuda"``) or plain XLA operations (``"xla"``).

    Args:
        tp: the product.
        convolution: whether the call is `TensorProduct.convolve`, or the plain product.
        impl: the argument of the call.
        platform: the platform that the call is compiled for, such as ``"cpu"`` or ``"cuda"``; None for the default
            backend of this process.

    Returns:
        The path. `TensorProduct.kernel_support` says why.

    Raises:
        OptionError: `impl` is none of the three.
        UnsupportedError: ``impl="cuda"`` for a product without kernels.

    Example:
        >>> tp = TensorProduct.channelwise("8x0e", "0e+1o")
        >>> path_taken(tp, platform="cuda"), path_taken(tp, platform="cpu"), path_taken(tp, impl="xla", platform="cuda")
        ('cuda', 'xla', 'xla')
    """
    _check_impl(tp, impl, graph=convolution)
    platform = platform or jax.default_backend()
    support = tp.kernel_support()
    runs = support.ok and not (support.swapped and convolution)
    return "cuda" if impl != "xla" and runs and platform in ("cuda", "gpu") else "xla"


def multiply(
    tp: TensorProduct,
    x: Float[Array, "..."],
    y: Float[Array, "..."],
    w: Float[Array, "..."] | None,
    *,
    impl: str,
) -> Float[Array, "..."]:
    """Evaluate ``tp(x, y, w)``; documented at `TensorProduct.__call__`."""
    x, y, w = _prepare(tp, x, y, w)
    _check_impl(tp, impl, graph=False)
    leading = {"x": x.shape[:-1], "y": y.shape[:-1]}
    shared = w is not None and w.ndim == 1
    if w is not None and not shared:
        leading["w"] = w.shape[:-1]
    try:
        shape = jnp.broadcast_shapes(*leading.values())
    except ValueError:
        raise ShapeError(
            "leading axes of the operands must broadcast against each other, got "
            + ", ".join(f"`{name}` {list(axes)}" for name, axes in leading.items())
        ) from None
    return _multiply(x, y, w, tp=tp, shape=shape, impl=impl)


@partial(jax.jit, static_argnames=("tp", "shape", "impl"), inline=True)
def _multiply(
    x: Array, y: Array, w: Array | None, *, tp: TensorProduct, shape: tuple[int, ...], impl: str
) -> Float[Array, "..."]:
    rows = math.prod(shape)
    shared = w is not None and w.ndim == 1
    flat = [
        v if v is None or (v is w and shared) else jnp.broadcast_to(v, (*shape, v.shape[-1])).reshape(rows, v.shape[-1])
        for v in (x, y, w)
    ]
    # Only mul_ir products are swapped: the layout covers x and z, and y, which takes the place of x, is mul_ir.
    swapped = tp.kernel_support().swapped
    if swapped:
        flat[0], flat[1] = flat[1], flat[0]
    z = _evaluate(tp, flat[0], flat[1], flat[2], (), rows=rows, num_z=rows, swapped=swapped, impl=impl)
    return z.reshape(*shape, z.shape[-1])


def convolve(
    tp: TensorProduct,
    x: Float[Array, "node x_dim"],
    y: Float[Array, "edge y_dim"],
    w: Float[Array, "..."] | None,
    senders: Int[Array, " edge"],
    receivers: Int[Array, " edge"],
    *,
    num_nodes: int,
    receivers_sorted: bool,
    edge_order: EdgeOrder | None,
    impl: str,
) -> Float[Array, "num_nodes z_dim"]:
    """Evaluate ``tp.convolve(...)``; documented at `TensorProduct.convolve`."""
    x, y, w = _prepare(tp, x, y, w)
    _check_impl(tp, impl, graph=True)
    _check_graph(senders, receivers, num_nodes)
    senders, receivers = _as_index(senders), _as_index(receivers)
    num_edges = senders.shape[0]
    if x.ndim != 2:
        raise ShapeError(
            f"`x` of convolve must have shape [num_nodes, {x.shape[-1]}], got {list(x.shape)}; use jax.vmap"
        )
    if y.shape[:-1] != (num_edges,):
        raise ShapeError(
            f"`y` must have one row for each edge, shape [{num_edges}, {y.shape[-1]}] as `senders` has {num_edges} "
            f"entries, got {list(y.shape)}"
        )
    if w is not None and w.ndim > 1 and w.shape[:-1] != (num_edges,):
        raise ShapeError(
            f"`w` must have shape [{num_edges}, {tp.weight_numel}] (a row for each edge) or [{tp.weight_numel}] "
            f"(shared), got {list(w.shape)}"
        )
    if edge_order is not None:
        if not isinstance(edge_order, EdgeOrder):
            raise GraphError(
                f"`edge_order` must come from jaxcg.sort_edges, got {type(edge_order).__name__}; "
                "make it once with jaxcg.sort_edges(senders, receivers, num_nodes)"
            )
        if edge_order.by_receiver.shape != (num_edges,):
            raise GraphError(
                f"`edge_order` must order {num_edges} edges, got {edge_order.by_receiver.shape[0]}; "
                "make it again whenever the graph changes"
            )
    return _convolve(
        x, y, w, senders, receivers, edge_order,
        tp=tp, num_nodes=num_nodes, receivers_sorted=receivers_sorted, impl=impl,
    )  # fmt: skip


@partial(jax.jit, static_argnames=("tp", "num_nodes", "receivers_sorted", "impl"), inline=True)
def _convolve(
    x: Array,
    y: Array,
    w: Array | None,
    senders: Array,
    receivers: Array,
    edge_order: EdgeOrder | None,
    *,
    tp: TensorProduct,
    num_nodes: int,
    receivers_sorted: bool,
    impl: str,
) -> Float[Array, "num_nodes z_dim"]:
    num_edges = senders.shape[0]
    present = (senders >= 0) & (senders < x.shape[0]) & (receivers >= 0) & (receivers < num_nodes)
    # One canonical form for all paths: an absent edge has a negative sender, and every receiver is in range.
    # Clipping is monotone, so receivers that were sorted still are.
    senders = jnp.where(present, senders, -1).astype(jnp.int32)
    receivers = jnp.clip(receivers, 0, max(num_nodes - 1, 0)).astype(jnp.int32)
    indices: tuple[Array, ...] = (senders, receivers)
    if edge_order is not None:
        # An order that was made by hand must not lead a kernel out of bounds.
        indices += (jnp.clip(edge_order.by_receiver, 0, max(num_edges - 1, 0)).astype(jnp.int32),)
    elif not receivers_sorted and impl != "xla" and tp.kernel_support().ok:
        indices += (jnp.argsort(receivers, stable=True).astype(jnp.int32),)
    return _evaluate(tp, x, y, w, indices, rows=num_edges, num_z=num_nodes, swapped=False, impl=impl)


def _evaluate(
    tp: TensorProduct,
    x: Array,
    y: Array,
    w: Array | None,
    indices: tuple[Array, ...],
    *,
    rows: int,
    num_z: int,
    swapped: bool,
    impl: str,
) -> Float[Array, "num_z z_dim"]:
    """Bind the primitive on flat operands, after two rewrites that kernels want.

    A kernel writes every output slot once, from one path, and streams one weight row an edge. So a channelwise
    product whose paths share slots writes private slots that are summed afterwards, and shared weights, which are
    the same for all rows, multiply the sum over edges instead of each edge.
    """
    support = tp.kernel_support()
    channelwise = support.ok and support.swapped == swapped
    shared = w is not None and w.ndim == 1
    total: Array | None = None
    for weighted in (True, False):
        plain = resolve(tp, False, swapped, "streamed" if weighted else "none")
        if not plain.paths:
            continue
        factored = channelwise and shared and weighted
        expanded = factored or (channelwise and not _private_slots(plain))
        call = Call(
            product=tp,
            expanded=expanded,
            swapped=swapped,
            weighting="factored" if factored else "streamed" if weighted else "none",
            indexed=bool(indices),
            ordered=len(indices) == 3,
            shared=shared and weighted and not factored,
            num_rows=rows,
            num_x=x.shape[0],
            num_z=num_z,
            impl=impl,
        )
        streamed = call.weighting == "streamed"
        operands = [x, y, w] if streamed and w is not None else [x, y]
        (z,) = apply(call, _terms.forward(streamed), indices, operands)
        if expanded:
            z = _collapse(z, plain, call.coupling, w if factored else None)
        total = z if total is None else total + z
    return jnp.zeros((num_z, tp.irreps_out.dim), x.dtype) if total is None else total


def _relayout(y: Float[Array, "rows y_dim"], tp: TensorProduct) -> Float[Array, "rows y_dim"]:
    """Rows of y with each block in the layout of the product."""
    if tp.layout == "mul_ir":
        return y
    blocks: list[Array] = []
    at = 0
    for mul, ir in tp.irreps_in2:
        block = y[:, at : at + mul * ir.dim].reshape(-1, mul, ir.dim)
        blocks.append(block.swapaxes(1, 2).reshape(-1, mul * ir.dim))
        at += mul * ir.dim
    return jnp.concatenate(blocks, axis=1) if blocks else y


def _private_slots(coupling: Coupling) -> bool:
    """Whether every output slot belongs to exactly one path."""
    slots = sorted((path.out_offset, path.mul_out * (2 * path.l3 + 1)) for path in coupling.paths)
    ends = [0, *np.cumsum([size for _, size in slots]).tolist()]
    return [offset for offset, _ in slots] == ends[:-1] and ends[-1] == coupling.dim_out


def _collapse(
    z: Float[Array, "rows expanded_dim"], plain: Coupling, expanded: Coupling, w: Float[Array, " weight"] | None
) -> Float[Array, "rows z_dim"]:
    """Sum private slots onto the output slots, times the shared weights if given."""
    slots: dict[int, Array] = {}
    for path, private in zip(plain.paths, expanded.paths, strict=True):
        part = z[:, private.out_offset : private.out_offset + path.mul_out * (2 * path.l3 + 1)]
        if w is not None and path.weight_offset is not None:
            factor = w[path.weight_offset : path.weight_offset + path.mul_out]
            components = 2 * path.l3 + 1
            repeated = jnp.tile(factor, components) if plain.layout == "ir_mul" else jnp.repeat(factor, components)
            part = part * repeated
        slots[path.out_offset] = slots[path.out_offset] + part if path.out_offset in slots else part
    filled, at = [], 0
    for offset in sorted(slots):
        if offset > at:
            filled.append(jnp.zeros((z.shape[0], offset - at), z.dtype))
        filled.append(slots[offset])
        at = offset + slots[offset].shape[1]
    if at < plain.dim_out or not filled:
        filled.append(jnp.zeros((z.shape[0], plain.dim_out - at), z.dtype))
    return jnp.concatenate(filled, axis=1)


def _prepare(tp: TensorProduct, x: Array, y: Array, w: Array | None) -> tuple[Array, Array, Array | None]:
    """Check dtypes and last axes, and promote the operands to one dtype."""
    expected = {
        "x": (tp.irreps_in1.dim, f"irreps_in1 = {tp.irreps_in1}"),
        "y": (tp.irreps_in2.dim, f"irreps_in2 = {tp.irreps_in2}"),
    }
    if tp.weight_numel > 0:
        if w is None:
            raise ShapeError(
                f"`w` must have shape [..., {tp.weight_numel}] or [{tp.weight_numel}], got None: "
                f"{sum(ins[4] for ins in tp.instructions)} of the {len(tp.instructions)} paths have weights"
            )
        expected["w"] = (tp.weight_numel, "the weights of all paths, `tp.weight_numel`")
    elif w is not None:
        if jnp.shape(w)[-1:] != (0,):
            raise ShapeError(
                f"`w` must be None, as no path of this product has weights, got shape {list(jnp.shape(w))}"
            )
        w = None
    operands = {"x": jnp.asarray(x), "y": jnp.asarray(y)} | ({"w": jnp.asarray(w)} if w is not None else {})
    for name, array in operands.items():
        dim, meaning = expected[name]
        if array.ndim < 1 or array.shape[-1] != dim:
            raise ShapeError(f"`{name}` must have last axis {dim} for {meaning}, got shape {list(array.shape)}")
    dtype = jnp.result_type(*operands.values())
    if jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_:
        dtype = jnp.dtype(float) if jax.config.read("jax_enable_x64") else jnp.dtype(jnp.float32)
    if dtype not in (jnp.float32, jnp.float64):
        raise DtypeError(
            "operands must promote to float32 or float64, got "
            + ", ".join(f"`{name}` {array.dtype}" for name, array in operands.items())
            + f" which promote to {dtype}; cast them to float32 first"
        )
    cast = {name: array.astype(dtype) for name, array in operands.items()}
    return cast["x"], cast["y"], cast.get("w")


def _as_index(index: Array) -> Int[Array, " edge"]:
    """The indices in a type that can be compared with any number of nodes, none of them changed into one in range."""
    if isinstance(index, np.ndarray) and index.dtype.itemsize == 8:
        # Without x64 JAX would keep the low 32 bits.
        index = np.clip(index, max(-1, np.iinfo(index.dtype).min), _LARGEST_INDEX).astype(np.int32)
    index = jnp.asarray(index)
    return index.astype(jnp.int32) if index.dtype.itemsize < 4 else index


def _check_graph(senders: Array, receivers: Array, num_nodes: int) -> None:
    for name, index in (("senders", senders), ("receivers", receivers)):
        dtype = jnp.result_type(index)
        if not jnp.issubdtype(dtype, jnp.integer):
            raise DtypeError(f"`{name}` must be integers (int32 or int64), got {dtype}")
        if jnp.ndim(index) != 1:
            raise ShapeError(f"`{name}` must have shape [num_edges], got {list(jnp.shape(index))}")
    if jnp.shape(senders) != jnp.shape(receivers):
        raise GraphError(
            f"`senders` and `receivers` must have one entry for each edge, got {jnp.shape(senders)[0]} senders and "
            f"{jnp.shape(receivers)[0]} receivers"
        )
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, (int, np.integer)) or num_nodes < 0:
        raise GraphError(f"`num_nodes` must be a non-negative Python integer known at trace time, got {num_nodes!r}")


def _check_impl(tp: TensorProduct, impl: str, graph: bool) -> None:
    if impl not in IMPLEMENTATIONS:
        raise OptionError(f"`impl` must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}")
    if impl == "cuda":
        support = tp.kernel_support()
        if not support.ok:
            raise UnsupportedError(f"impl='cuda' has no kernel for this product: {support.reason}; use impl='auto'")
        if graph and support.swapped:
            raise UnsupportedError(
                "impl='cuda' has no convolution kernel for mode 'uvv', only one for the plain product; use impl='auto'"
            )
