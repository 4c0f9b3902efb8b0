"""Flax nnx modules whose weights come from radial features through a small network.

>>> import e3nn_jax as e3nn
>>> layer = Convolution("4x0e + 4x1o", "0e + 1o", 8, filter_ir_out="0e + 1o", scale=0.5, rngs=nnx.Rngs(0))
>>> layer.irreps_out
8x0e+8x1o
>>> x, y, radial = e3nn.ones("4x0e + 4x1o", (3,)), e3nn.ones("0e + 1o", (2,)), jnp.ones((2, 8))
>>> layer(x, y, radial, jnp.array([0, 1]), jnp.array([1, 2])).shape
(3, 32)
"""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import e3nn_jax as e3nn
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxcg._errors import IrrepsError
from jaxcg._irreps import IrrepsLike, as_filter, as_irreps
from jaxcg._problem import Implementation
from jaxcg.e3nn import Filter, Operand, convolve, message_irreps, weighted_tensor_product

from ._common import Activation, as_widths, normalised

if TYPE_CHECKING:
    from jaxcg._operations import EdgeOrder

__all__ = ["Convolution", "RadialNetwork", "TensorProduct"]


class RadialNetwork(nnx.Module):
    """A multilayer perceptron without biases: radial features that vanish at the cutoff give weights that do.

    (So the activation should map 0 to 0, as silu, gelu and tanh do.)

    Args:
        num_radial: number of radial features.
        hidden: widths of the hidden layers; ``()`` for a linear map.
        features: width of the result.
        activation: between layers, divided by its root mean square over standard normal input.
        dtype: dtype of the computation; None promotes the input and the parameters.
        param_dtype: dtype of the parameters.
        rngs: keys for the parameters.
    """

    def __init__(
        self,
        num_radial: int,
        hidden: tuple[int, ...],
        features: int,
        *,
        activation: Activation = nnx.silu,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.activation = activation
        self.depth = len(hidden)
        self.features = features
        widths = (num_radial, *hidden, features) if features else ()
        for number, (width_in, width_out) in enumerate(pairwise(widths)):
            layer = nnx.Linear(width_in, width_out, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
            # Attributes rather than a list: how nnx holds lists of modules differs between its releases.
            setattr(self, f"layer_{number}", layer)

    def __call__(self, radial: Float[Array, "... num_radial"]) -> Float[Array, "... features"]:
        """``[..., num_radial]`` -> ``[..., features]``."""
        if self.features == 0:
            return jnp.zeros((*radial.shape[:-1], 0), radial.dtype)
        value = radial
        for number in range(self.depth + 1):
            value = getattr(self, f"layer_{number}")(value)
            if number < self.depth:
                value = normalised(self.activation, value)
        return value


class _Weighted(nnx.Module):
    """Irreps, keywords and radial network that both modules have."""

    def __init__(
        self,
        irreps_x: IrrepsLike,
        irreps_y: IrrepsLike,
        num_radial: int,
        *,
        filter_ir_out: Filter = None,
        hidden: tuple[int, ...] = (64,),
        activation: Activation = nnx.silu,
        impl: Implementation = "auto",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        # As text: irreps are pytrees, which nnx would take apart.
        self._irreps_x = str(as_irreps(irreps_x, "irreps_x"))
        self._irreps_y = str(as_irreps(irreps_y, "irreps_y"))
        keep = as_filter(filter_ir_out)
        self._keep = None if keep is None else "+".join(map(str, sorted(keep)))
        self.impl: Implementation = impl
        self.radial = RadialNetwork(
            num_radial,
            as_widths(hidden),
            self.irreps_out.num_irreps,
            activation=activation,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    @property
    def irreps_out(self) -> e3nn.Irreps:
        """Irreps of the result, sorted and merged."""
        return message_irreps(self._irreps_x, self._irreps_y, self._keep)

    def _check(self, x: Operand, y: Operand) -> tuple[e3nn.IrrepsArray, e3nn.IrrepsArray]:
        x, y = e3nn.as_irreps_array(x), e3nn.as_irreps_array(y)
        for name, array, irreps in (("x", x, self._irreps_x), ("y", y, self._irreps_y)):
            if array.irreps != e3nn.Irreps(irreps):
                raise IrrepsError.of(
                    name,
                    expected=f"an array of the irreps given at construction, {irreps}",
                    received=str(array.irreps),
                )
        return x, y


class TensorProduct(_Weighted):
    r"""The weighted tensor product, with weights from radial features, row by row.

    $$z = R(r) \, (x \otimes y)$$

    one weight for each channel of the regrouped product.

    Args:
        irreps_x: irreps of x.
        irreps_y: irreps of y.
        num_radial: number of radial features.
        filter_ir_out: output irreps to keep; None keeps all.
        hidden: widths of the hidden layers of the network R.
        activation: activation of R, see `RadialNetwork`.
        impl: ``"auto"``, ``"cuda"`` or ``"xla"``.
        dtype: dtype of R's computation; None promotes its input and parameters.
        param_dtype: dtype of the parameters.
        rngs: keys for the parameters.
    """

    def __call__(self, x: Operand, y: Operand, radial: Float[Array, "... num_radial"]) -> e3nn.IrrepsArray:
        """The product of each row.

        Args:
            x: ``[..., irreps_x.dim]``.
            y: ``[..., irreps_y.dim]``.
            radial: ``[..., num_radial]``. Leading axes of all three broadcast.

        Returns:
            ``[..., irreps_out.dim]``, irreps sorted and merged.

        Raises:
            IrrepsError: x or y has other irreps than given at construction.
        """
        x, y = self._check(x, y)
        return weighted_tensor_product(x, y, self.radial(radial), filter_ir_out=self._keep, impl=self.impl)


class Convolution(_Weighted):
    r"""Messages with weights from radial features, summed at the receivers, without a per-edge result in memory.

    $$z_n = scale \sum_{e: r_e = n} R(r_e) \, (x_{s_e} \otimes y_e)$$

    See `jaxcg.e3nn.convolve`.

    Args:
        irreps_x: irreps of x.
        irreps_y: irreps of y.
        num_radial: number of radial features.
        scale: factor of the result, such as ``1 / sqrt(average number of neighbours)``.
        rngs: keys for the parameters.
        **options: the keywords of `TensorProduct`.
    """

    def __init__(
        self,
        irreps_x: IrrepsLike,
        irreps_y: IrrepsLike,
        num_radial: int,
        *,
        scale: float = 1.0,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        self.scale = scale
        super().__init__(irreps_x, irreps_y, num_radial, rngs=rngs, **options)

    def __call__(
        self,
        x: Operand,
        y: Operand,
        radial: Float[Array, "edge num_radial"],
        senders: Int[Array, " edge"],
        receivers: Int[Array, " edge"],
        *,
        num_nodes: int | None = None,
        receivers_sorted: bool = False,
        edge_order: "EdgeOrder | None" = None,
        deterministic: bool = False,
        compensated: bool = False,
    ) -> e3nn.IrrepsArray:
        """Convolve node features with edge features.

        Args:
            x: ``[num_senders, irreps_x.dim]``, node features.
            y: ``[num_edges, irreps_y.dim]``, edge features.
            radial: ``[num_edges, num_radial]``.
            senders: ``[num_edges]``, rows of x.
            receivers: ``[num_edges]``, rows of the result. An edge with an index out of range is absent.
            num_nodes: rows of the result; None: as many as x.
            receivers_sorted: a promise that receivers do not decrease.
            edge_order: what `jaxcg.sort_edges` made of the same senders and receivers.
            deterministic: whether gradients of x repeat bit by bit too, see `jaxcg.TensorProduct.convolve`.
            compensated: whether sums over edges carry along what rounding takes from them, see there.

        Returns:
            ``[num_nodes, irreps_out.dim]``, irreps sorted and merged.

        Raises:
            IrrepsError: x or y has other irreps than given at construction.
        """
        x, y = self._check(x, y)
        return convolve(
            x, y, self.radial(radial), senders, receivers,
            num_nodes=x.shape[0] if num_nodes is None else num_nodes,
            filter_ir_out=self._keep, scale=self.scale, impl=self.impl,
            receivers_sorted=receivers_sorted, edge_order=edge_order,
            deterministic=deterministic, compensated=compensated,
        )  # fmt: skip
