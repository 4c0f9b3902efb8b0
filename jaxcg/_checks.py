"""What an operation asks of its arguments: every error of use is raised here or in `_operations`, at trace time."""

from functools import partial

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxcg._errors import DtypeError, GraphError, OptionError, ShapeError, UnsupportedError
from jaxcg._problem import TensorProduct

IMPLEMENTATIONS = ("auto", "cuda", "xla")
_LARGEST_INDEX = np.iinfo(np.int32).max


def prepare_operands(tp: TensorProduct, x: Array, y: Array, w: Array | None) -> tuple[Array, Array, Array | None]:
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
        shape = as_array("w", w).shape
        if shape[-1:] != (0,):
            raise ShapeError(f"`w` must be None, as no path of this product has weights, got shape {list(shape)}")
        w = None
    given = {"x": x, "y": y} | ({} if w is None else {"w": w})
    operands = {name: as_array(name, value) for name, value in given.items()}
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


def as_array(name: str, value: object) -> Array:
    """An operand as an array of JAX."""
    if not hasattr(value, "irreps"):
        try:
            return jnp.asarray(value)
        except (TypeError, ValueError):
            pass
    raise DtypeError.of(
        name,
        expected="an array of numbers",
        received=type(value).__name__,
        fix="for an IrrepsArray take its `.array`, or the functions of jaxcg.e3nn",
    )


def as_index(index: Array | np.ndarray) -> Int[Array, " edge"]:
    """The indices in a type that can be compared with any number of nodes, none of them changed into one in range."""
    if isinstance(index, np.ndarray) and index.dtype.itemsize == 8:
        # Without x64 JAX would keep the low 32 bits.
        index = np.clip(index, max(-1, np.iinfo(index.dtype).min), _LARGEST_INDEX).astype(np.int32)
    array = jnp.asarray(index)
    return array.astype(jnp.int32) if array.dtype.itemsize < 4 else array


def check_graph(senders: Array, receivers: Array, num_nodes: int) -> None:
    """Raise unless the index arrays are integer vectors of one length and the number of nodes is static."""
    for name, index in (("senders", senders), ("receivers", receivers)):
        dtype = getattr(index, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
            received = type(index).__name__ if dtype is None else dtype
            raise DtypeError.of(name, expected="an array of integers (int32 or int64)", received=received)
        if jnp.ndim(index) != 1:
            raise ShapeError(f"`{name}` must have shape [num_edges], got {list(jnp.shape(index))}")
    if jnp.shape(senders) != jnp.shape(receivers):
        raise GraphError(
            f"`senders` and `receivers` must have one entry for each edge, got {jnp.shape(senders)[0]} senders and "
            f"{jnp.shape(receivers)[0]} receivers"
        )
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, (int, np.integer)) or num_nodes < 0:
        raise GraphError(f"`num_nodes` must be a non-negative Python integer known at trace time, got {num_nodes!r}")
    if num_nodes > _LARGEST_INDEX:
        raise GraphError(f"`num_nodes` must be at most {_LARGEST_INDEX}, as indices have 32 bits, got {num_nodes}")


def check_impl(tp: TensorProduct, impl: str, graph: bool) -> None:
    """Raise unless the product has the implementation that is asked for."""
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


def require_sorted(name: str, index: Int[Array, " edge"], order: Int[Array, " edge"] | None, num_nodes: int) -> None:
    """Raise unless the kernels would walk each edge once, and the index (receivers, say) does not decrease on the way.

    Known arrays are checked at once. Traced ones are checked when the program runs, on the host: the error then comes
    out of the runtime, with this text in it.
    """
    index = jnp.clip(index, 0, max(num_nodes - 1, 0))
    edges = index.shape[0]
    walked = index
    whole: Array | bool = True
    if order is not None:
        walked = jnp.take(index, order, mode="clip")
        whole = jnp.all(jnp.zeros(edges, jnp.int32).at[order].add(1, mode="drop") == 1) & jnp.all(order >= 0)
    falls = walked[1:] < walked[:-1]
    found = (jnp.any(falls), jnp.argmax(falls) if edges > 1 else 0, whole)
    if any(isinstance(value, jax.core.Tracer) for value in found):
        jax.debug.callback(partial(_complain_if_unsorted, name), *found)
    else:
        _complain_if_unsorted(name, *found)


def _complain_if_unsorted(name: str, falls: Array, where: Array | int, whole: Array | bool) -> None:
    if not bool(whole):
        raise GraphError.of(
            "edge_order",
            expected="each edge number once",
            received="an order that misses some and repeats others",
            fix="make it with jaxcg.sort_edges",
        )
    if bool(falls):
        raise GraphError.of(
            name,
            expected=f"in ascending order, as {'`receivers_sorted` or ' * (name == 'receivers')}`edge_order` says",
            received=f"a {name.removesuffix('s')} after a higher one at edge {int(where) + 1} of the walk",
            fix="sort the edges, make the order again with jaxcg.sort_edges, or claim nothing",
        )
