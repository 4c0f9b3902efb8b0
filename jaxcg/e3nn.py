"""Front end for e3nn-jax: the same products on `e3nn_jax.IrrepsArray`.

`tensor_product` and `elementwise_tensor_product` take the place of the functions of the same names in e3nn-jax;
`convolve` takes the place of gather, tensor product, weights and scatter in an equivariant message-passing layer.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import e3nn_jax as e3nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._errors import IrrepsError, ShapeError
from ._instructions import Instruction
from ._irreps import Block, IrrepsLike, as_filter, blocks, from_blocks, product
from ._problem import Implementation, TensorProduct

if TYPE_CHECKING:
    from ._operations import EdgeOrder

Operand: TypeAlias = e3nn.IrrepsArray | Array
Filter: TypeAlias = IrrepsLike | None

__all__ = ["convolve", "elementwise_tensor_product", "message_irreps", "tensor_product", "weighted_tensor_product"]


def tensor_product(
    input1: Operand | e3nn.Irreps | str,
    input2: Operand | e3nn.Irreps | str,
    *,
    filter_ir_out: Filter = None,
    irrep_normalization: str | None = None,
    regroup_output: bool = True,
) -> Any:
    r"""The tensor product reduced into irreps: `e3nn_jax.tensor_product`, to rounding.

    $$z^{p}_{(uv)k} = a_p \sum_{ij} C^p_{ijk} x_{ui} y_{vj}$$

    for every path p = (block of x, block of y, output irrep), a_p the irrep normalisation.

    Args:
        input1: ``[..., irreps1.dim]``, an `IrrepsArray` (a plain array counts as scalars), or irreps.
        input2: ``[..., irreps2.dim]``, likewise. Leading axes broadcast.
        filter_ir_out: output irreps to keep; None keeps all.
        irrep_normalization: ``"component"``, ``"norm"`` or ``"none"``; None takes e3nn's configuration.
        regroup_output: sort and merge equal irreps, in both inputs and in the result.

    Returns:
        `IrrepsArray` of shape ``[..., irreps_out.dim]``; the irreps alone when an input is irreps.

    Raises:
        DtypeError: an input is bfloat16 or float16.
        OptionError, IrrepsError: a keyword is not understood.

    >>> tensor_product("2x1e + 2e", "2e")
    1x0e+3x1e+3x2e+3x3e+1x4e
    """
    if _irreps_only(input1, input2):
        irreps1, irreps2 = _irreps_of(input1), _irreps_of(input2)
        if regroup_output:
            irreps1, irreps2 = irreps1.regroup(), irreps2.regroup()
        out = TensorProduct.full(irreps1, irreps2, filter_ir_out, irrep_normalization=irrep_normalization).irreps_out
        return out.regroup() if regroup_output else out
    x, y = e3nn.as_irreps_array(input1), e3nn.as_irreps_array(input2)  # pyright: ignore[reportArgumentType]
    if regroup_output:
        x, y = _regrouped(x), _regrouped(y)
    tp = TensorProduct.full(x.irreps, y.irreps, filter_ir_out, irrep_normalization=irrep_normalization)
    z = _apply(tp, x, y)
    # Slots are sorted already, so that merging equal irreps moves nothing in memory.
    return z.simplify() if regroup_output else z


def elementwise_tensor_product(
    input1: Operand | e3nn.Irreps | str,
    input2: Operand | e3nn.Irreps | str,
    *,
    filter_ir_out: Filter = None,
    irrep_normalization: str | None = None,
) -> Any:
    r"""The product channel by channel: `e3nn_jax.elementwise_tensor_product`, to rounding.

    $$z^{p}_{uk} = a_p \sum_{ij} C^p_{ijk} x_{ui} y_{uj}$$

    Args:
        input1: ``[..., irreps1.dim]``, an `IrrepsArray` (a plain array counts as scalars), or irreps.
        input2: ``[..., irreps2.dim]``, likewise, with as many channels as `input1`. Leading axes broadcast.
        filter_ir_out: output irreps to keep; None keeps all.
        irrep_normalization: ``"component"``, ``"norm"`` or ``"none"``; None takes e3nn's configuration.

    Returns:
        `IrrepsArray` of shape ``[..., irreps_out.dim]``, neither sorted nor merged; the irreps alone when an input is
        irreps.

    Raises:
        IrrepsError: the inputs have different numbers of channels.

    >>> elementwise_tensor_product("2x0e + 1o", "1e + 0o + 0o")
    1x1e+1x0o+1x1e
    """
    if _irreps_only(input1, input2):
        return TensorProduct.elementwise(
            _irreps_of(input1), _irreps_of(input2), filter_ir_out, irrep_normalization=irrep_normalization
        ).irreps_out
    x, y = e3nn.as_irreps_array(input1), e3nn.as_irreps_array(input2)  # pyright: ignore[reportArgumentType]
    tp = TensorProduct.elementwise(x.irreps, y.irreps, filter_ir_out, irrep_normalization=irrep_normalization)
    return _apply(tp, x.rechunk(tp.irreps_in1), y.rechunk(tp.irreps_in2))


def convolve(
    x: Operand,
    y: Operand,
    w: Float[Array, "..."] | e3nn.IrrepsArray | None,
    senders: Int[Array, " edge"],
    receivers: Int[Array, " edge"],
    *,
    num_nodes: int,
    filter_ir_out: Filter = None,
    scale: float | Float[Array, ""] = 1.0,
    receivers_sorted: bool = False,
    edge_order: "EdgeOrder | None" = None,
    check_sorted: bool = False,
    deterministic: bool = False,
    compensated: bool = False,
    impl: Implementation = "auto",
) -> e3nn.IrrepsArray:
    r"""Messages of an equivariant layer, summed at the receivers, without a per-edge result in memory.

    $$z_n = scale \sum_{e: r_e = n} w_e \, (x_{s_e} \otimes y_e)$$

    equal to rounding to::

        messages = e3nn.tensor_product(x[senders], y, filter_ir_out=filter_ir_out)   # regrouped
        z = scale * e3nn.scatter_sum(messages * w, dst=receivers, output_size=num_nodes)

    Generated kernels run it when every irrep of y has multiplicity 1 (such as spherical harmonics); XLA runs the rest.

    Args:
        x: ``[num_senders, irreps_x.dim]``, node features.
        y: ``[num_edges, irreps_y.dim]``, edge features.
        w: ``[num_edges, n]`` weights, n = ``message_irreps(...).num_irreps``, in the order of the regrouped output
            irreps; ``[n]`` when shared by all edges; None for none.
        senders: ``[num_edges]``, rows of x.
        receivers: ``[num_edges]``, rows of the result. An edge with an index out of range is absent.
        num_nodes: rows of the result.
        filter_ir_out: output irreps to keep; None keeps all.
        scale: factor of the result, such as ``1 / sqrt(average number of neighbours)``.
        receivers_sorted: a promise that receivers do not decrease.
        edge_order: what `jaxcg.sort_edges` made of the same senders and receivers.
        check_sorted: for debugging: raise if the promise or the order is wrong.
        deterministic: whether gradients of x repeat bit by bit too, see `jaxcg.TensorProduct.convolve`.
        compensated: whether sums over edges carry along what rounding takes from them, see there.
        impl: ``"auto"``, ``"cuda"`` or ``"xla"``.

    Returns:
        `IrrepsArray` of shape ``[num_nodes, irreps_out.dim]``, irreps sorted and merged.

    Raises:
        ShapeError, DtypeError, GraphError: an array does not fit.
        UnsupportedError: ``impl="cuda"`` where y has a multiplicity above 1.

    >>> x, y = e3nn.ones("8x0e + 8x1o", (3,)), e3nn.ones("0e + 1o", (2,))
    >>> w = jnp.ones((2, message_irreps(x.irreps, y.irreps, "0e + 1o").num_irreps))
    >>> senders, receivers = jnp.array([0, 1]), jnp.array([1, 2])
    >>> convolve(x, y, w, senders, receivers, num_nodes=3, filter_ir_out="0e + 1o").irreps
    16x0e+16x1o
    """
    tp, x, y, weights = _message_operands(x, y, w, filter_ir_out)
    z = tp.convolve(
        x.array, y.array, weights, senders, receivers,
        num_nodes=num_nodes, receivers_sorted=receivers_sorted, edge_order=edge_order, check_sorted=check_sorted,
        deterministic=deterministic, compensated=compensated, impl=impl,
    )  # fmt: skip
    if not (isinstance(scale, int | float) and scale == 1):
        z = z * jnp.asarray(scale, z.dtype)
    return e3nn.IrrepsArray(tp.irreps_out.simplify(), z)


def weighted_tensor_product(
    x: Operand,
    y: Operand,
    w: Float[Array, "..."] | e3nn.IrrepsArray | None,
    *,
    filter_ir_out: Filter = None,
    impl: Implementation = "auto",
) -> e3nn.IrrepsArray:
    r"""The messages of `convolve`, row by row: ``tensor_product(x, y, filter_ir_out=filter_ir_out) * w``.

    Args:
        x: ``[..., irreps_x.dim]``.
        y: ``[..., irreps_y.dim]``.
        w: ``[..., n]`` or ``[n]`` weights, as in `convolve`. Leading axes of all three broadcast.
        filter_ir_out: output irreps to keep; None keeps all.
        impl: ``"auto"``, ``"cuda"`` or ``"xla"``.

    Returns:
        `IrrepsArray` of shape ``[..., irreps_out.dim]``, irreps sorted and merged.

    Raises:
        ShapeError, DtypeError: an array does not fit.
        UnsupportedError: ``impl="cuda"`` where y has a multiplicity above 1.

    >>> weighted_tensor_product(e3nn.ones("2x1o", ()), e3nn.ones("0e", ()), jnp.array([1.0, 2.0]))
    2x1o [1. 1. 1. 2. 2. 2.]
    """
    tp, x, y, weights = _message_operands(x, y, w, filter_ir_out)
    return e3nn.IrrepsArray(tp.irreps_out.simplify(), tp(x.array, y.array, weights, impl=impl))


def message_irreps(irreps_x: IrrepsLike, irreps_y: IrrepsLike, filter_ir_out: Filter = None) -> e3nn.Irreps:
    """Irreps of the messages of `convolve`: its weights are one for each of their channels.

    >>> message_irreps("8x0e + 8x1o", "0e + 1o", "0e + 1o")
    16x0e+16x1o
    """
    return tensor_product(_irreps_of(irreps_x), _irreps_of(irreps_y), filter_ir_out=filter_ir_out)


def _message_operands(
    x: Operand, y: Operand, w: Float[Array, "..."] | e3nn.IrrepsArray | None, filter_ir_out: Filter
) -> tuple[TensorProduct, e3nn.IrrepsArray, e3nn.IrrepsArray, Array | None]:
    x, y = e3nn.as_irreps_array(x), e3nn.as_irreps_array(y)
    weights = _weights(w)
    irreps_y = y.irreps.simplify()
    if len({ir for _, ir in blocks(irreps_y)}) < len(irreps_y):
        # Equal irreps of y lie apart: e3nn interleaves their channels in the result.
        y = y.regroup()
        irreps_y = y.irreps
    tp = _message_product(x.irreps, irreps_y, as_filter(filter_ir_out), weights is not None)
    if weights is not None and (weights.ndim < 1 or weights.shape[-1] != tp.weight_numel):
        raise ShapeError.of(
            "w",
            expected=f"an array with last axis {tp.weight_numel}, one weight for each channel of the messages "
            f"{tp.irreps_out.simplify()}",
            received=f"shape {list(weights.shape)}",
        )
    return tp, x, y, weights


def _message_product(
    irreps_x: e3nn.Irreps, irreps_y: e3nn.Irreps, keep: frozenset[e3nn.Irrep] | None, weighted: bool
) -> TensorProduct:
    # e3nn's configuration is read at the call, as e3nn does, and is part of the key.
    normalization = str(e3nn.config("irrep_normalization"))
    return _cached_message_product(irreps_x, irreps_y, keep, weighted, normalization)


@lru_cache(maxsize=256)
def _cached_message_product(
    irreps_x: e3nn.Irreps,
    irreps_y: e3nn.Irreps,
    keep: frozenset[e3nn.Irrep] | None,
    weighted: bool,
    irrep_normalization: str,
) -> TensorProduct:
    """A product whose output slots, read one after the other, are e3nn's regrouped messages.

    e3nn regroups x and y first, loops over their irreps and sorts the slots. Here instructions point at the blocks of
    x where they are, in that order, so that nothing is permuted at run time: equal irreps of x make neighbouring slots.
    """
    in_x: dict[e3nn.Irrep, list[int]] = {}
    for number, (mul, ir) in enumerate(blocks(irreps_x)):
        if mul:
            in_x.setdefault(ir, []).append(number)
    in_y = {ir: number for number, (mul, ir) in enumerate(blocks(irreps_y)) if mul}
    mul_x, mul_y = ([mul for mul, _ in blocks(irreps)] for irreps in (irreps_x, irreps_y))
    paths = [
        (ir_out, number, in_y[ir_y])
        for ir_x in sorted(in_x)
        for ir_y in sorted(in_y)
        for ir_out in product(ir_x, ir_y)
        if keep is None or ir_out in keep
        for number in in_x[ir_x]
    ]
    paths.sort(key=lambda path: path[0])
    slots: list[Block] = []
    instructions: list[Instruction] = []
    for ir_out, i1, i2 in paths:
        mode = "uvu" if mul_y[i2] == 1 else "uvuv"
        instructions.append((i1, i2, len(slots), mode, weighted, 1.0))
        slots.append((mul_x[i1] * mul_y[i2], ir_out))
    return TensorProduct(irreps_x, irreps_y, from_blocks(slots), instructions, irrep_normalization=irrep_normalization)


def _apply(tp: TensorProduct, x: e3nn.IrrepsArray, y: e3nn.IrrepsArray) -> e3nn.IrrepsArray:
    """The product of two arrays in the irreps of `tp`; blocks that e3nn knows to be zero stay known to be zero."""
    zero_flags = [True] * len(tp.irreps_out)
    instructions: list[Instruction] = []
    for i1, i2, i_out, mode, has_weight, path_weight in tp.instructions:
        if x.zero_flags[i1] or y.zero_flags[i2]:
            continue
        zero_flags[i_out] = False
        # With one channel in y, uvuv is uvu, which generated kernels run.
        if mode == "uvuv" and blocks(tp.irreps_in2)[i2][0] == 1:
            mode = "uvu"
        instructions.append((i1, i2, i_out, mode, has_weight, path_weight))
    reduced = TensorProduct(
        tp.irreps_in1, tp.irreps_in2, tp.irreps_out, instructions, irrep_normalization=tp.irrep_normalization
    )
    z = reduced(jnp.asarray(x.array), jnp.asarray(y.array))
    return e3nn.IrrepsArray(tp.irreps_out, z, zero_flags=tuple(zero_flags))  # pyright: ignore[reportCallIssue]


def _irreps_only(*inputs: object) -> bool:
    return any(isinstance(value, e3nn.Irreps | str) for value in inputs)


def _irreps_of(value: object) -> e3nn.Irreps:
    if isinstance(value, e3nn.IrrepsArray):
        return value.irreps
    if isinstance(value, e3nn.Irreps | e3nn.Irrep | str) or isinstance(value, Iterable):
        return e3nn.Irreps(value)  # pyright: ignore[reportArgumentType]
    raise IrrepsError.of("input", expected="irreps, as the other input is", received=type(value).__name__)


def _regrouped(x: e3nn.IrrepsArray) -> e3nn.IrrepsArray:
    """`x.regroup()`, without copying what is in order already."""
    return x.simplify() if x.irreps.sort().irreps == x.irreps else x.regroup()


def _weights(w: Float[Array, "..."] | e3nn.IrrepsArray | None) -> Array | None:
    if isinstance(w, e3nn.IrrepsArray):
        if not all(ir.is_scalar() for _, ir in blocks(w.irreps)):
            raise IrrepsError.of("w", expected="scalars (0e)", received=str(w.irreps))
        return w.array
    return None if w is None else jnp.asarray(w)
