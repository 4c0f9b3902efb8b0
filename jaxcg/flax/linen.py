"""Flax linen modules whose weights come from radial features through a small network.

>>> import e3nn_jax as e3nn, jax, jax.numpy as jnp
>>> layer = Convolution(filter_ir_out="0e + 1o", hidden=(16,), scale=0.5)
>>> x, y, radial = e3nn.ones("4x0e + 4x1o", (3,)), e3nn.ones("0e + 1o", (2,)), jnp.ones((2, 8))
>>> operands = (x, y, radial, jnp.array([0, 1]), jnp.array([1, 2]))
>>> variables = layer.init(jax.random.key(0), *operands)
>>> layer.apply(variables, *operands).irreps
8x0e+8x1o
"""

from typing import TYPE_CHECKING, Any

import e3nn_jax as e3nn
import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxcg._problem import Implementation
from jaxcg.e3nn import Filter, Operand, convolve, message_irreps, weighted_tensor_product

from ._common import Activation, as_widths, normalised

if TYPE_CHECKING:
    from jaxcg._operations import EdgeOrder

__all__ = ["Convolution", "RadialNetwork", "TensorProduct"]


class RadialNetwork(nn.Module):
    """A multilayer perceptron without biases: radial features that vanish at the cutoff give weights that do.

    (So the activation should map 0 to 0, as silu, gelu and tanh do.)

    Attributes:
        hidden: widths of the hidden layers; ``()`` for a linear map.
        features: width of the result.
        activation: between layers, divided by its root mean square over standard normal input.
        dtype: dtype of the computation; None promotes the input and the parameters.
        param_dtype: dtype of the parameters; None takes that of the input.
    """

    hidden: tuple[int, ...]
    features: int
    activation: Activation = nn.silu
    dtype: Any = None
    param_dtype: Any = None

    @nn.compact
    def __call__(self, radial: Float[Array, "... num_radial"]) -> Float[Array, "... features"]:
        """``[..., num_radial]`` -> ``[..., features]``."""
        if self.features == 0:
            return jnp.zeros((*radial.shape[:-1], 0), radial.dtype)
        widths = (*self.hidden, self.features)
        param_dtype = radial.dtype if self.param_dtype is None else self.param_dtype
        value = radial
        for number, width in enumerate(widths):
            layer = nn.Dense(width, use_bias=False, dtype=self.dtype, param_dtype=param_dtype, name=f"layer_{number}")
            value = layer(value)
            if number < len(self.hidden):
                value = normalised(self.activation, value)
        return value


class TensorProduct(nn.Module):
    r"""The weighted tensor product, with weights from radial features, row by row.

    $$z = R(r) \, (x \otimes y)$$

    one weight for each channel of the regrouped product.

    Attributes:
        filter_ir_out: output irreps to keep; None keeps all.
        hidden: widths of the hidden layers of the network R.
        activation: activation of R, see `RadialNetwork`.
        impl: ``"auto"``, ``"cuda"`` or ``"xla"``.
        dtype: dtype of R's computation; None promotes its input and parameters.
        param_dtype: dtype of the parameters; None takes that of the radial features.
    """

    filter_ir_out: Filter = None
    hidden: tuple[int, ...] = (64,)
    activation: Activation = nn.silu
    impl: Implementation = "auto"
    dtype: Any = None
    param_dtype: Any = None

    @nn.compact
    def __call__(self, x: Operand, y: Operand, radial: Float[Array, "... num_radial"]) -> e3nn.IrrepsArray:
        """The product of each row.

        Args:
            x: ``[..., irreps_x.dim]``.
            y: ``[..., irreps_y.dim]``.
            radial: ``[..., num_radial]``. Leading axes of all three broadcast.

        Returns:
            ``[..., irreps_out.dim]``, irreps sorted and merged.
        """
        w = _weights(self, x, y, radial)
        return weighted_tensor_product(x, y, w, filter_ir_out=self.filter_ir_out, impl=self.impl)


class Convolution(nn.Module):
    r"""Messages with weights from radial features, summed at the receivers, without a per-edge result in memory.

    $$z_n = scale \sum_{e: r_e = n} R(r_e) \, (x_{s_e} \otimes y_e)$$

    See `jaxcg.e3nn.convolve`.

    Attributes:
        filter_ir_out: output irreps to keep; None keeps all.
        hidden: widths of the hidden layers of the network R.
        activation: activation of R, see `RadialNetwork`.
        scale: factor of the result, such as ``1 / sqrt(average number of neighbours)``.
        impl: ``"auto"``, ``"cuda"`` or ``"xla"``.
        dtype: dtype of R's computation; None promotes its input and parameters.
        param_dtype: dtype of the parameters; None takes that of the radial features.
    """

    filter_ir_out: Filter = None
    hidden: tuple[int, ...] = (64,)
    activation: Activation = nn.silu
    scale: float = 1.0
    impl: Implementation = "auto"
    dtype: Any = None
    param_dtype: Any = None

    @nn.compact
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
        """
        return convolve(
            x, y, _weights(self, x, y, radial), senders, receivers,
            num_nodes=x.shape[0] if num_nodes is None else num_nodes,
            filter_ir_out=self.filter_ir_out, scale=self.scale, impl=self.impl,
            receivers_sorted=receivers_sorted, edge_order=edge_order,
            deterministic=deterministic, compensated=compensated,
        )  # fmt: skip


def _weights(
    module: TensorProduct | Convolution, x: Operand, y: Operand, radial: Float[Array, "... num_radial"]
) -> Float[Array, "... weight"]:
    irreps_x, irreps_y = e3nn.as_irreps_array(x).irreps, e3nn.as_irreps_array(y).irreps
    return RadialNetwork(
        hidden=as_widths(module.hidden),
        features=message_irreps(irreps_x, irreps_y, module.filter_ir_out).num_irreps,
        activation=module.activation,
        dtype=module.dtype,
        param_dtype=module.param_dtype,
        name="radial",
    )(radial)
