"""The two operations of a `TensorProduct`: arguments checked, flattened to rows, and given to the primitive."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxcg import _terms
from jaxcg._checks import as_array, as_index, check_graph, check_impl, prepare_operands, require_sorted
from jaxcg._coupling import Coupling
from jaxcg._errors import GraphError, OptionError, ShapeError
from jaxcg._primitive import Call, apply, resolve
from jaxcg._problem import TensorProduct


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EdgeOrder:
    """Orders of the edges of a graph, made once and reused by every step on it.

    Attributes:
        by_receiver: ``[num_edges]`` int32, edge numbers in ascending order of receiver (stable).
        by_sender: the same by sender, for gradients of x that are summed sender by sender (``deterministic=True``,
            ``compensated=True``). If it is None, each such gradient sorts the edges itself.
    """

    by_receiver: Int[Array, " edge"]
    by_sender: Int[Array, " edge"] | None = None


def sort_edges(senders: Int[Array, " edge"], receivers: Int[Array, " edge"], num_nodes: int) -> EdgeOrder:
    """Order edges by receiver, and by sender.

    The kernels sum onto each receiver once, which needs the edges of a receiver to follow each other. They read
    edge e through this order, so no per-edge array is moved in memory. Gradients that are summed sender by sender do
    the same with the order by sender. (Both orders of 56,000 edges: 0.14 ms on an H200.) Within a compiled function the
    one that nobody reads costs nothing.

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
        >>> order = sort_edges(jnp.array([0, 1, 0]), jnp.array([2, 0, 1]), 3)
        >>> order.by_receiver, order.by_sender
        (Array([1, 2, 0], dtype=int32), Array([0, 2, 1], dtype=int32))
    """
    check_graph(senders, receivers, num_nodes)
    receivers = jnp.clip(as_index(receivers), 0, max(num_nodes - 1, 0))
    # How many senders there are is not known here. A call clips them, which keeps their order.
    keys = (receivers, as_index(senders))
    return EdgeOrder(*(jnp.argsort(key, stable=True).astype(jnp.int32) for key in keys))


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
    check_impl(tp, impl, graph=convolution)
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
    x, y, w = prepare_operands(tp, x, y, w)
    check_impl(tp, impl, graph=False)
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

    def flatten(array: Array) -> Array:
        return jnp.broadcast_to(array, (*shape, array.shape[-1])).reshape(rows, array.shape[-1])

    first, second = flatten(x), flatten(y)
    weights = w if w is None or shared else flatten(w)
    swapped = tp.kernel_support().swapped
    if swapped:
        # The layout covers blocks of x and z; y, which takes the place of x here, is mul_ir until now.
        first, second = _relayout(second, tp), first
    z = _evaluate(tp, first, second, weights, (), rows=rows, num_z=rows, swapped=swapped, impl=impl)
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
    check_sorted: bool,
    deterministic: bool,
    compensated: bool,
    impl: str,
) -> Float[Array, "num_nodes z_dim"]:
    """Evaluate ``tp.convolve(...)``; documented at `TensorProduct.convolve`."""
    x, y, w = prepare_operands(tp, x, y, w)
    check_impl(tp, impl, graph=True)
    check_graph(senders, receivers, num_nodes)
    senders, receivers = as_index(senders), as_index(receivers)
    num_edges = senders.shape[0]
    flags = {"receivers_sorted": receivers_sorted, "deterministic": deterministic, "compensated": compensated}
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise OptionError.of(name, expected="True or False", received=repr(flag))
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
        given = [edge_order.by_receiver, *([] if edge_order.by_sender is None else [edge_order.by_sender])]
        edge_order = EdgeOrder(*(as_array("edge_order", order) for order in given))
        for order in jax.tree.leaves(edge_order):
            if order.shape != (num_edges,) or not jnp.issubdtype(order.dtype, jnp.integer):
                raise GraphError(
                    f"`edge_order` must hold {num_edges} integers, one for each edge, got {order.dtype} of shape "
                    f"{list(order.shape)}; make it again with jaxcg.sort_edges whenever the graph changes"
                )
    if check_sorted and (receivers_sorted or edge_order is not None):
        require_sorted("receivers", receivers, None if edge_order is None else edge_order.by_receiver, num_nodes)
    if check_sorted and edge_order is not None and edge_order.by_sender is not None:
        require_sorted("senders", senders, edge_order.by_sender, x.shape[0])
    return _convolve(
        x, y, w, senders, receivers, edge_order,
        tp=tp, num_nodes=num_nodes, receivers_sorted=bool(receivers_sorted), deterministic=bool(deterministic),
        compensated=bool(compensated), impl=impl,
    )  # fmt: skip


_STATIC = ("tp", "num_nodes", "receivers_sorted", "deterministic", "compensated", "impl")


@partial(jax.jit, static_argnames=_STATIC, inline=True)
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
    deterministic: bool,
    compensated: bool,
    impl: str,
) -> Float[Array, "num_nodes z_dim"]:
    num_edges = senders.shape[0]
    present = (senders >= 0) & (senders < x.shape[0]) & (receivers >= 0) & (receivers < num_nodes)
    # One canonical form for all paths: an absent edge has a negative sender, the complement of one in range, and every
    # receiver is in range. Clipping is monotone, so what was sorted still is.
    senders = jnp.clip(senders, 0, max(x.shape[0] - 1, 0)).astype(jnp.int32)
    senders = jnp.where(present, senders, ~senders)
    receivers = jnp.clip(receivers, 0, max(num_nodes - 1, 0)).astype(jnp.int32)
    indices: tuple[Array, ...] = (senders, receivers)
    if edge_order is not None:
        orders = [edge_order.by_receiver]
        if edge_order.by_sender is not None and (deterministic or compensated) and impl != "xla":
            orders.append(edge_order.by_sender)
        # An order that was made by hand must not lead a kernel out of bounds.
        indices += tuple(jnp.clip(order, 0, max(num_edges - 1, 0)).astype(jnp.int32) for order in orders)
    elif not receivers_sorted and impl != "xla" and tp.kernel_support().ok:
        indices += (jnp.argsort(receivers, stable=True).astype(jnp.int32),)
    return _evaluate(
        tp, x, y, w, indices,
        rows=num_edges, num_z=num_nodes, swapped=False, impl=impl, deterministic=deterministic, compensated=compensated,
    )  # fmt: skip


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
    deterministic: bool = False,
    compensated: bool = False,
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
            ordered=len(indices) > 2,
            by_sender=len(indices) > 3,
            shared=shared and weighted and not factored,
            num_rows=rows,
            num_x=x.shape[0],
            num_z=num_z,
            impl=impl,
            deterministic=deterministic,
            compensated=compensated,
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
        if mul == 0:
            continue
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
