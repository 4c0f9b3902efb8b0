"""The one JAX primitive: a term set of one product over one graph, with rules for every transformation.

`jax.jvp`, `jax.vjp` and all their compositions rewrite the term set (`_terms`); batching moves the batch to rows
and offsets the indices; dead-code elimination drops outputs nobody asks for, and then the operands only they read.
A product without a graph is the case where row e reads row e of every operand.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxcg import _reference, _terms
from jaxcg._coupling import Coupling, couple, exchange
from jaxcg._errors import GraphError, UnsupportedError
from jaxcg._jax_internals import (
    Primitive,
    ad,
    batching,
    match_varying_axes,
    mlir,
    partitioned_by_xla,
    register_dce,
    result_aval,
)
from jaxcg._problem import TensorProduct
from jaxcg._terms import TermSet


@lru_cache(maxsize=1024)
def resolve(product: TensorProduct, expanded: bool, swapped: bool, weighting: str) -> Coupling:
    """The paths of a product that one call covers, see `Call.weighting`.

    The two kinds are different forms: a path without weights is not linear in w, so its derivative by w is 0 while
    its other derivatives are not. A product that mixes them is the sum of two calls.
    """
    whole = couple(product, expanded=expanded, swapped=swapped)
    paths, at = [], 0
    for path in whole.paths:
        if (path.weight_offset is None) == (weighting == "none"):
            path = replace(path, out_offset=at) if expanded else path
            paths.append(path if weighting == "streamed" else replace(path, weight_offset=None, weight_shape=()))
            at += path.mul_out * (2 * path.l3 + 1)
    return replace(
        whole,
        paths=tuple(paths),
        dim_out=at if expanded else whole.dim_out,
        weight_numel=whole.weight_numel if weighting == "streamed" else 0,
    )


@dataclass(frozen=True)
class Call:
    """What is fixed at trace time about one call, beside its term set.

    Attributes:
        product: the tensor product.
        expanded: every path writes an output slot of its own (see `couple`).
        swapped: operands 1 and 2 are exchanged (see `couple`).
        weighting: ``"streamed"``: the paths that have weights, w is an operand; ``"factored"``: the same paths, their
            weights applied to the result by the caller; ``"none"``: the paths that have no weights.
        indexed: the first two operands are `senders` and `receivers`, one for each edge. An absent edge has the
            complement ``~sender`` of a sender in range, so negative; every receiver is in range.
        ordered: the third operand is the order in which edges are sorted by receiver.
        by_sender: the fourth operand is the order in which they are sorted by sender.
        shared: all rows share one weight vector.
        num_rows: edges, or rows of a product without graph.
        num_x: rows of an x operand.
        num_z: rows of a z operand.
        impl: ``"auto"``, ``"cuda"`` or ``"xla"``.
        deterministic: gradients of x are summed sender by sender, so that all results repeat bit by bit.
        compensated: sums over edges carry what rounding takes from them; gradients of x sender by sender, too.
        exchanged: the roles of x and z are exchanged, see `jaxcg._coupling.exchange`.
    """

    product: TensorProduct
    expanded: bool
    swapped: bool
    weighting: str
    indexed: bool
    ordered: bool
    shared: bool
    num_rows: int
    num_x: int
    num_z: int
    impl: str
    deterministic: bool = False
    compensated: bool = False
    by_sender: bool = False
    exchanged: bool = False

    @property
    def coupling(self) -> Coupling:
        coupling = resolve(self.product, self.expanded, self.swapped, self.weighting)
        return exchange(coupling) if self.exchanged else coupling

    @property
    def num_indices(self) -> int:
        return 2 * self.indexed + self.ordered + self.by_sender

    @property
    def sums_by_sender(self) -> bool:
        """Whether gradients of x are sums over the edges of a sender, in order, and not added atomically."""
        return self.deterministic or self.compensated

    def shape(self, slot: str) -> tuple[int, ...]:
        """Shape of an array of one slot."""
        coupling = self.coupling
        if slot == "w":
            return (coupling.weight_numel,) if self.shared else (self.num_rows, coupling.weight_numel)
        rows = {"x": self.num_x, "y": self.num_rows, "z": self.num_z}[slot]
        return rows, {"x": coupling.dim_in1, "y": coupling.dim_in2, "z": coupling.dim_out}[slot]

    def __repr__(self) -> str:
        # Shown in every jaxpr equation: the sizes, not the coefficients.
        kind = f"graph {self.num_x}->{self.num_z}" if self.indexed else "rows"
        return f"Call({self.product.irreps_in1} x {self.product.irreps_in2}, {kind}, {self.num_rows}, {self.impl})"


_MOST_INDEXED_ROWS = 2**31 - 1

product_p = Primitive("jaxcg_product")
product_p.multiple_results = True


def apply(call: Call, terms: TermSet, indices: Sequence[Array], operands: Sequence[Array]) -> list[Array]:
    """Evaluate a term set: the only way into the primitive.

    Outputs without terms and calls without rows are zeros and bind nothing: no kernel ever sees a size of 0.
    """
    most = max(call.num_rows, call.num_x, call.num_z)
    if call.indexed and most > _MOST_INDEXED_ROWS:
        raise GraphError.of(
            "num_nodes, senders or the batch",
            expected=f"at most {_MOST_INDEXED_ROWS} edges and nodes in all, as indices have 32 bits",
            received=f"{call.num_rows} edges, {call.num_x} senders and {call.num_z} receivers",
            fix="split the graph, or the batch, with jax.lax.map",
        )
    dtype = jnp.result_type(*operands)
    live = [bool(out.terms) for out in terms.outputs]
    if call.num_rows == 0 or call.num_x == 0 or call.num_z == 0 or not call.coupling.paths:
        live = [False] * len(live)
    results: list[Array] = []
    if any(live):
        smaller, read = _terms.prune(terms, live)
        kept = [operand for operand, is_read in zip(operands, read, strict=True) if is_read]
        results = list(product_p.bind(*match_varying_axes(*indices, *kept), call=call, terms=smaller))
    made = iter(results)
    return [
        next(made) if is_live else jnp.zeros(call.shape(out.slot), dtype)
        for out, is_live in zip(terms.outputs, live, strict=True)
    ]


def _abstract(*avals: Any, call: Call, terms: TermSet) -> list[Any]:
    operand = avals[-1]
    return [result_aval(call.shape(out.slot), operand.dtype, operand) for out in terms.outputs]


@lru_cache(maxsize=4096)
def _compiled(call: Call, terms: TermSet) -> Callable[..., list[Array]]:
    return jax.jit(partial(product_p.bind, call=call, terms=terms))


def _run(*args: Array, call: Call, terms: TermSet) -> list[Array]:
    return _compiled(call, terms)(*args)


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], *, call: Call, terms: TermSet) -> tuple[list, list]:
    indices, operands = primals[: call.num_indices], primals[call.num_indices :]
    moves = [type(t) is not ad.Zero for t in tangents[call.num_indices :]]
    given = [t for t in tangents[call.num_indices :] if type(t) is not ad.Zero]
    results = product_p.bind(*primals, call=call, terms=terms)
    derivative = _terms.jvp(terms, moves)
    moved = apply(call, derivative, indices, [*operands, *given])
    out_tangents = [
        tangent if out.terms else ad.Zero(jax.typeof(result).to_tangent_aval())
        for out, tangent, result in zip(derivative.outputs, moved, results, strict=True)
    ]
    return list(results), out_tangents


def _transpose(cotangents: Sequence[Any], *args: Any, call: Call, terms: TermSet) -> list[Any]:
    indices, operands = args[: call.num_indices], args[call.num_indices :]
    linear = [ad.is_undefined_primal(operand) for operand in operands]
    has_cotangent = [type(c) is not ad.Zero for c in cotangents]
    known = [operand for operand, is_linear in zip(operands, linear, strict=True) if not is_linear]
    given = [c for c in cotangents if type(c) is not ad.Zero]
    transposed = _terms.transpose(terms, linear, has_cotangent)
    found = iter(zip(transposed.outputs, apply(call, transposed, indices, [*known, *given]), strict=True))
    gradients: list[Any] = [None] * len(indices)
    for operand, is_linear in zip(operands, linear, strict=True):
        if not is_linear:
            gradients.append(None)
            continue
        out, value = next(found)
        gradients.append(value if out.terms else ad.Zero(operand.aval))
    return gradients


def _batch(args: Sequence[Array], dims: Sequence[Any], *, call: Call, terms: TermSet) -> tuple[list, list]:
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    if size == 0:
        dtype = args[-1].dtype
        return [jnp.zeros((0, *call.shape(out.slot)), dtype) for out in terms.outputs], [0] * len(terms.outputs)
    slots = ("index",) * call.num_indices + terms.operands
    batched = [dim is not None for dim in dims]
    moved = [arg if dim is None else jnp.moveaxis(arg, dim, 0) for arg, dim in zip(args, dims, strict=True)]
    weights_move = any(is_batched for is_batched, slot in zip(batched, slots, strict=True) if slot == "w")
    if call.shared and (weights_move or any(out.slot == "w" for out in terms.outputs)):
        # One weight vector for each batch entry: rows of several entries cannot share it, and copying it to all
        # rows would multiply memory by the number of edges. One entry after the other keeps memory flat.
        fixed = [None if is_batched else arg for arg, is_batched in zip(moved, batched, strict=True)]
        stacked = [arg for arg, is_batched in zip(moved, batched, strict=True) if is_batched]

        def one(entry: list[Array]) -> list[Array]:
            entries = iter(entry)
            return product_p.bind(*(next(entries) if f is None else f for f in fixed), call=call, terms=terms)

        return list(jax.lax.map(one, stacked)), [0] * len(terms.outputs)

    larger = replace(call, num_rows=size * call.num_rows, num_x=size * call.num_x, num_z=size * call.num_z)

    def spread(arg: Array, is_batched: bool) -> Array:
        return arg if is_batched else jnp.broadcast_to(arg, (size, *arg.shape))

    indices: list[Array] = []
    for number in range(call.num_indices):
        index = spread(moved[number], batched[number])
        step = (call.num_x, call.num_z, call.num_rows, call.num_rows)[number]
        offset = (jnp.arange(size, dtype=index.dtype) * step)[:, None]
        # Absent edges (negative sender) stay absent, and what is sorted stays sorted, each inside its own graph.
        indices.append(jnp.where(index < 0, index - offset, index + offset).reshape(-1))
    operands = []
    for arg, is_batched, slot in zip(moved, batched, slots, strict=True):
        if slot == "index":
            continue
        if slot == "w" and call.shared:
            operands.append(arg)
        else:
            operands.append(spread(arg, is_batched).reshape(-1, arg.shape[-1]))
    results = apply(larger, terms, indices, operands)
    return [result.reshape(size, *call.shape(out.slot)) for out, result in zip(terms.outputs, results, strict=True)], [
        0
    ] * len(results)


def _eliminate(used_outputs: list[bool], equation: Any) -> tuple[list[bool], Any]:
    call, terms = equation.params["call"], equation.params["terms"]
    if not any(used_outputs):
        return [False] * len(equation.invars), None
    smaller, read = _terms.prune(terms, used_outputs)
    used_inputs = [True] * call.num_indices + list(read)
    return used_inputs, equation.replace(
        invars=[var for var, used in zip(equation.invars, used_inputs, strict=True) if used],
        outvars=[var for var, used in zip(equation.outvars, used_outputs, strict=True) if used],
        params=dict(equation.params, terms=smaller),
    )


def evaluate_with_xla(*args: Array, call: Call, terms: TermSet) -> list[Array]:
    """The XLA path of one call."""
    indices = args[: call.num_indices]
    return _reference.evaluate(
        call.coupling,
        terms,
        indices[0] if call.indexed else None,
        indices[1] if call.indexed else None,
        args[call.num_indices :],
        num_rows=call.num_rows,
        num_x=call.num_x,
        num_z=call.num_z,
        shared=call.shared,
        compensated=call.compensated,
    )


def kernel_objection(call: Call) -> str | None:
    """Why no generated kernel can take a call, or None if one can."""
    support = call.product.kernel_support()
    if not support.ok:
        return support.reason
    if support.swapped and not call.swapped:
        return "mode 'uvv' has kernels for the plain product only"
    if call.shared:
        return "shared weights of a product that is not channelwise"
    return None


def lower_xla(ctx: Any, *args: Any, call: Call, terms: TermSet) -> Any:
    """Lowering of the primitive to plain XLA operations."""
    if call.impl == "cuda":
        platforms = ctx.module_context.platforms
        raise UnsupportedError(
            f"impl='cuda' needs a CUDA device, but this call is compiled for {', '.join(platforms)}; "
            "use impl='auto' to take the kernels where there are any and XLA elsewhere"
        )
    return mlir.lower_fun(partial(evaluate_with_xla, call=call, terms=terms), multiple_results=True)(ctx, *args)


@cache
def _log_once(message: str) -> None:
    logging.getLogger("jaxcg").info(message)


def kernel_lowering(compiler_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """Lowering of the primitive to generated kernels.

    Args:
        compiler_of: from the lowering context to the compiler of texts (see `jaxcg.runtime.launch.Compiler`).

    Returns:
        A lowering rule. Under ``impl="auto"`` it leaves to XLA, and logs once, the calls that no kernel takes, and
        programs that XLA divides among devices by itself.
    """

    def lower(ctx: Any, *args: Any, call: Call, terms: TermSet) -> Any:
        from jaxcg.runtime import launch  # loads the code generator only where a kernel is wanted

        if call.impl == "xla":
            return lower_xla(ctx, *args, call=call, terms=terms)
        objection = kernel_objection(call)
        if partitioned_by_xla(ctx):
            objection = "XLA divides this program among devices, but cannot divide a kernel; wrap it in jax.shard_map"
        if objection is not None:
            if call.impl == "cuda":
                raise UnsupportedError(f"impl='cuda' cannot run {call!r}: {objection}, or use impl='auto'")
            _log_once(
                f"{call.product.irreps_in1} x {call.product.irreps_in2} runs as plain XLA operations: {objection}"
            )
            return lower_xla(ctx, *args, call=replace(call, impl="xla"), terms=terms)
        try:
            run = launch.custom_call(call, terms, compiler_of(ctx))
            return mlir.lower_fun(run, multiple_results=True)(ctx, *args)
        except UnsupportedError as error:  # more rows, or more shared memory, than a kernel can have
            if call.impl == "cuda":
                raise
            _log_once(f"{call.product.irreps_in1} x {call.product.irreps_in2} runs as plain XLA operations: {error}")
            return lower_xla(ctx, *args, call=replace(call, impl="xla"), terms=terms)

    return lower


def _compiler_of(ctx: Any) -> Any:
    from jaxcg.runtime import ffi, launch

    ffi.require_extension()
    return launch.compile_for(launch.targets_of(ctx))


product_p.def_abstract_eval(_abstract)
product_p.def_impl(_run)
ad.primitive_jvps[product_p] = _jvp
ad.primitive_transposes[product_p] = _transpose
batching.primitive_batchers[product_p] = _batch
register_dce(product_p, _eliminate)
mlir.register_lowering(product_p, lower_xla)
mlir.register_lowering(product_p, kernel_lowering(_compiler_of), platform="cuda")
