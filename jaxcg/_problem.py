"""`TensorProduct`: the frozen description of a product, and nothing else: no arrays, no kernels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

import e3nn_jax as e3nn
import numpy as np
from jaxtyping import Array, Float, Int

from ._errors import GraphError, OptionError
from ._instructions import (
    MODES,
    Instruction,
    IrrepOrder,
    WeightOrder,
    aligned,
    check_instructions,
    check_option,
    elementwise_slots,
    private_slots,
)
from ._irreps import IrrepsLike, as_filter, as_irreps, blocks, multiplicity, product
from ._support import Support, kernel_support

if TYPE_CHECKING:
    from ._operations import EdgeOrder

Layout: TypeAlias = Literal["mul_ir", "ir_mul"]
Implementation: TypeAlias = Literal["auto", "cuda", "xla"]


@dataclass(frozen=True, init=False)
class TensorProduct:
    r"""An equivariant tensor product of two operands, as data.

    $$z_{wk} = \sum_p c_p \sum_{uv} w^p_{uvw} \sum_{ij} C^p_{ijk} x_{ui} y_{vj}$$

    over paths p (instructions), with the Clebsch-Gordan coefficients C in e3nn's real basis (m = -l..l), and with
    $c_p$ the path and irrep normalisation of `e3nn_jax.legacy.FunctionalTensorProduct` for weights of unit variance
    (``gradient_normalization="path"``). The mode of a path says which of u, v, w are tied together.

    Args:
        irreps_in1: irreps of the first operand, x.
        irreps_in2: irreps of the second operand, y.
        irreps_out: irreps of the result, z.
        instructions: ``(i_in1, i_in2, i_out, mode, has_weight[, path_weight])`` for each path: block numbers in the
            three irreps, a mode out of ``uvw uvu uvv uuw uuu uvuv``, whether the path has weights, and its relative
            share of the variance (1.0). Weights are concatenated in this order; a path has weights of shape
            ``[mul1, mul2, mul_out]`` (uvw), ``[mul1, mul2]`` (uvu, uvv, uvuv), ``[mul1, mul_out]`` (uuw),
            ``[mul1]`` (uuu).
        irrep_normalization: ``"component"``, ``"norm"`` or ``"none"``. None takes e3nn's configuration, once, here.
        path_normalization: ``"element"``, ``"path"`` or a number between (0: element, 1: path). None as above.
        layout: order in memory within each block of x and z: ``"mul_ir"`` (e3nn) or ``"ir_mul"``. y is ``mul_ir``.

    Raises:
        IrrepsError: irreps cannot be read.
        InstructionError: an instruction does not fit the irreps or its mode.
        OptionError: a keyword has a value outside the allowed ones.

    >>> tp = TensorProduct("8x0e+8x1o", "0e+1o", "8x1o", [(0, 1, 0, "uvu", True), (1, 0, 0, "uvu", True)])
    >>> tp.weight_numel, tp.irreps_out.dim
    (16, 24)
    """

    irreps_in1: e3nn.Irreps
    irreps_in2: e3nn.Irreps
    irreps_out: e3nn.Irreps
    instructions: tuple[Instruction, ...]
    irrep_normalization: str
    path_normalization: str | float
    layout: Layout

    def __init__(
        self,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        irreps_out: IrrepsLike,
        instructions: Iterable[Sequence[object]],
        *,
        irrep_normalization: str | None = None,
        path_normalization: str | float | None = None,
        layout: Layout = "mul_ir",
    ) -> None:
        in1, in2 = as_irreps(irreps_in1, "irreps_in1"), as_irreps(irreps_in2, "irreps_in2")
        out = as_irreps(irreps_out, "irreps_out")
        if irrep_normalization is None:
            irrep_normalization = str(e3nn.config("irrep_normalization"))
        check_option("irrep_normalization", irrep_normalization, ("component", "norm", "none"))
        check_option("layout", layout, ("mul_ir", "ir_mul"))
        values = {
            "irreps_in1": in1,
            "irreps_in2": in2,
            "irreps_out": out,
            "instructions": check_instructions(instructions, in1, in2, out),
            "irrep_normalization": irrep_normalization,
            "path_normalization": _read_path_normalization(path_normalization),
            "layout": layout,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def channelwise(
        cls,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        filter_ir_out: IrrepsLike | None = None,
        *,
        weight_order: WeightOrder = "path",
        irrep_order: IrrepOrder = "jax",
        irrep_normalization: str | None = None,
        path_normalization: str | float | None = None,
        layout: Layout = "mul_ir",
    ) -> Self:
        """The product of equivariant message passing: mode uvu, one weight per path and pair of channels.

        Every path (block of x, block of y, output irrep) has an output slot of its own; slots are sorted by irrep,
        equal irreps in the order of the loop over x, then y, then output irreps.

        Args:
            irreps_in1: irreps of x, such as node features.
            irreps_in2: irreps of y, such as spherical harmonics of an edge.
            filter_ir_out: output irreps to keep; None keeps all.
            weight_order: ``"path"``: weights in the order of the loop (NequIP); ``"slot"``: in the order of the
                output slots (MACE, SevenNet from 0.11).
            irrep_order: how slots are sorted: ``"jax"`` 0e < 0o < 1o < 1e < 2e < 2o (e3nn-jax), ``"torch"``
                0o < 0e < 1o < 1e < 2o < 2e (torch e3nn).
            irrep_normalization: see the class.
            path_normalization: see the class.
            layout: see the class.

        Returns:
            The product. Blocks of multiplicity 0 have no path.

        >>> tp = TensorProduct.channelwise("8x0e+8x1o", "0e+1o+2e", filter_ir_out="0e+1o+2e")
        >>> tp.irreps_out, tp.weight_numel
        (8x0e+8x0e+8x1o+8x1o+8x1o+8x2e+8x2e, 56)
        """
        in1, in2 = as_irreps(irreps_in1, "irreps_in1"), as_irreps(irreps_in2, "irreps_in2")
        out, instructions = private_slots(
            in1, in2, as_filter(filter_ir_out), "uvu", True, weight_order=weight_order, irrep_order=irrep_order
        )
        return cls(
            in1, in2, out, instructions,
            irrep_normalization=irrep_normalization, path_normalization=path_normalization, layout=layout,
        )  # fmt: skip

    @classmethod
    def fully_connected(
        cls,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        irreps_out: IrrepsLike,
        *,
        irrep_normalization: str | None = None,
        path_normalization: str | float | None = None,
        layout: Layout = "mul_ir",
    ) -> Self:
        """Every allowed path between the three irreps, mode uvw: weights of shape ``[mul1, mul2, mul_out]``.

        >>> TensorProduct.fully_connected("4x0e+2x1o", "0e+1o", "3x1o").weight_numel
        18
        """
        in1, in2 = as_irreps(irreps_in1, "irreps_in1"), as_irreps(irreps_in2, "irreps_in2")
        out = as_irreps(irreps_out, "irreps_out")
        instructions = [
            (i1, i2, i_out, "uvw", True)
            for i1, (_, ir1) in enumerate(blocks(in1))
            for i2, (_, ir2) in enumerate(blocks(in2))
            for i_out, (_, ir_out) in enumerate(blocks(out))
            if ir_out in product(ir1, ir2)
        ]
        return cls(
            in1, in2, out, instructions,
            irrep_normalization=irrep_normalization, path_normalization=path_normalization, layout=layout,
        )  # fmt: skip

    @classmethod
    def full(
        cls,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        filter_ir_out: IrrepsLike | None = None,
        *,
        irrep_normalization: str | None = None,
        layout: Layout = "mul_ir",
    ) -> Self:
        """All pairs of channels, no weights, mode uvuv: `e3nn_jax.tensor_product` with ``regroup_output=False``.

        >>> TensorProduct.full("2x1o", "2x0e+1o", filter_ir_out="0e+1o").irreps_out
        2x0e+4x1o
        """
        in1, in2 = as_irreps(irreps_in1, "irreps_in1"), as_irreps(irreps_in2, "irreps_in2")
        out, instructions = private_slots(in1, in2, as_filter(filter_ir_out), "uvuv", False, keep_empty=True)
        return cls(in1, in2, out, instructions, irrep_normalization=irrep_normalization, layout=layout)

    @classmethod
    def elementwise(
        cls,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        filter_ir_out: IrrepsLike | None = None,
        *,
        irrep_normalization: str | None = None,
        layout: Layout = "mul_ir",
    ) -> Self:
        """Channel by channel, no weights, mode uuu: `e3nn_jax.elementwise_tensor_product`.

        Both irreps must have the same number of channels. Their blocks are split until multiplicities agree, so
        `irreps_in1` and `irreps_in2` of the product may have more blocks than those given (with the same channels in
        the same order).

        >>> TensorProduct.elementwise("2x0e+1o", "1e+0o+0o").irreps_out
        1x1e+1x0o+1x1e
        """
        in1, in2 = aligned(as_irreps(irreps_in1, "irreps_in1"), as_irreps(irreps_in2, "irreps_in2"))
        out, instructions = elementwise_slots(in1, in2, as_filter(filter_ir_out))
        return cls(in1, in2, out, instructions, irrep_normalization=irrep_normalization, layout=layout)

    def weight_shape(self, number: int) -> tuple[int, ...]:
        """Shape of the weights of an instruction, by its number; ``()`` when it has none."""
        *_, mode, has_weight, _ = self.instructions[number]
        return MODES[mode].weight_shape(*self.multiplicities(number)) if has_weight else ()

    def multiplicities(self, number: int) -> tuple[int, int, int]:
        """Multiplicities (mul1, mul2, mul_out) of the blocks of an instruction."""
        i_in1, i_in2, i_out, *_ = self.instructions[number]
        mul1, mul2 = multiplicity(self.irreps_in1, i_in1), multiplicity(self.irreps_in2, i_in2)
        return mul1, mul2, multiplicity(self.irreps_out, i_out)

    @property
    def weight_numel(self) -> int:
        """Number of weights of one row: the sum over the weighted instructions."""
        shapes = (self.weight_shape(n) for n, instruction in enumerate(self.instructions) if instruction[4])
        return sum(prod(shape) for shape in shapes)

    def active_instructions(self) -> tuple[int, ...]:
        """Numbers of the instructions that touch no block of multiplicity 0."""
        return tuple(number for number in range(len(self.instructions)) if all(self.multiplicities(number)))

    def kernel_support(self) -> Support:
        """Whether generated CUDA kernels can run this product, and why (or why not).

        Returns:
            `Support`. Blocks of multiplicity 0 play no part in the answer.

        >>> TensorProduct.channelwise("8x0e", "0e+1o").kernel_support().ok
        True
        >>> TensorProduct.fully_connected("8x0e", "0e", "8x0e").kernel_support().ok
        False
        """
        return kernel_support(self)

    def explain(self) -> str:
        """A table of the paths (irreps, mode, nonzeros, weights, kernel), then operations and bytes per row.

        >>> print(TensorProduct.channelwise("8x0e", "1o").explain().splitlines()[0])
        8x0e x 1x1o -> 8x1o: 1 path, 8 weights, layout mul_ir
        """
        from ._explain import explain

        return explain(self)

    def __call__(
        self,
        x: Float[Array, "... dim_in1"],
        y: Float[Array, "... dim_in2"],
        w: Float[Array, "... weight_numel"] | None = None,
        *,
        impl: Implementation = "auto",
    ) -> Float[Array, "... dim_out"]:
        """The product of each row: z = tp(x, y, w).

        Args:
            x: ``[..., irreps_in1.dim]``.
            y: ``[..., irreps_in2.dim]``.
            w: ``[..., weight_numel]``; left out when no instruction has weights. Leading axes of all three broadcast.
            impl: ``"auto"``: generated kernels on a CUDA device where `kernel_support` says so, XLA elsewhere;
                ``"xla"``; ``"cuda"``, which raises where kernels cannot run.

        Returns:
            ``[..., irreps_out.dim]`` in the promoted dtype.

        Raises:
            ShapeError, DtypeError: an array does not fit.
            UnsupportedError: ``impl="cuda"`` for a product that generated kernels cannot run.
        """
        from . import _operations

        return _operations.multiply(self, x, y, w, impl=impl)

    def convolve(
        self,
        x: Float[Array, "node dim_in1"],
        y: Float[Array, "edge dim_in2"],
        w: Float[Array, "... weight_numel"] | None = None,
        senders: Int[Array, " edge"] | None = None,
        receivers: Int[Array, " edge"] | None = None,
        *,
        num_nodes: int,
        receivers_sorted: bool = False,
        edge_order: "EdgeOrder | None" = None,
        check_sorted: bool = False,
        deterministic: bool = False,
        compensated: bool = False,
        impl: Implementation = "auto",
    ) -> Float[Array, "receiver dim_out"]:
        r"""The product on every edge, summed at the receivers, with no per-edge result in memory.

        $$z_n = \sum_{e: r_e = n} tp(x_{s_e}, y_e, w_e)$$

        An edge whose sender is outside ``[0, x.shape[0])`` or whose receiver is outside ``[0, num_nodes)`` is absent.

        Args:
            x: ``[num_senders, irreps_in1.dim]``.
            y: ``[num_edges, irreps_in2.dim]``.
            w: ``[num_edges, weight_numel]``, or ``[weight_numel]`` shared by all edges, or None without weights.
            senders: ``[num_edges]``, rows of x.
            receivers: ``[num_edges]``, rows of the result.
            num_nodes: rows of the result.
            receivers_sorted: a promise that receivers do not decrease, which saves preparation. Padding at the end
                keeps it with receiver `num_nodes`, not -1. A wrong promise gives wrong numbers, never an access out
                of bounds.
            edge_order: what `jaxcg.sort_edges` made of the same senders and receivers.
            check_sorted: for debugging: raise if the promise or the order is wrong; a compiled program when it runs.
            deterministic: on a CUDA device, whether gradients of x repeat bit by bit too, in derivatives of any order.
                Without it kernels add them atomically, and they repeat to rounding; all else repeats in either case. It
                costs a sort of the edges by sender, unless `edge_order` brings it, and reading w, y and the cotangent
                once more. The XLA path has its own flag, ``--xla_gpu_deterministic_ops``.
            compensated: whether sums over edges (z, and gradients of x) carry along what rounding takes from them, so
                that their error does not grow with the number of edges (Kahan, "Further remarks on reducing truncation
                errors", 1965). For float32 on graphs with very many edges a node. Kernels then sum gradients of x as
                with `deterministic`. A sum that leaves the range of its dtype may end as NaN instead of infinity.
            impl: see `__call__`.

        Returns:
            ``[num_nodes, irreps_out.dim]`` in the promoted dtype.

        Raises:
            ShapeError, DtypeError, GraphError: an array does not fit.
            UnsupportedError: ``impl="cuda"`` for a product that generated kernels cannot run.
        """
        from . import _operations

        if senders is None or receivers is None:
            missing = "senders" if senders is None else "receivers"
            raise GraphError.of(missing, expected="an integer array of shape [num_edges]", received=None)
        return _operations.convolve(
            self, x, y, w, senders, receivers,
            num_nodes=num_nodes, receivers_sorted=receivers_sorted, edge_order=edge_order, check_sorted=check_sorted,
            deterministic=deterministic, compensated=compensated, impl=impl,
        )  # fmt: skip


def _read_path_normalization(value: str | float | None) -> str | float:
    """One spelling for each meaning, so that equal products compare equal."""
    if value is None:
        value = e3nn.config("path_normalization")
    if isinstance(value, str):
        check_option("path_normalization", value, ("element", "path"))
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating) or not 0.0 <= value <= 1.0:
        raise OptionError.of(
            "path_normalization", expected="'element', 'path' or a number in [0, 1]", received=repr(value)
        )
    return {0.0: "element", 1.0: "path"}.get(float(value), float(value))
