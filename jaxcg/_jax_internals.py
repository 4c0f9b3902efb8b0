"""Every name that jaxcg takes from outside JAX's documented interface, in one place.

JAX moves these between releases (lowest tested 0.7, highest tested 0.11): a new release that breaks jaxcg is
mended here and nowhere else.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax._src.interpreters import partial_eval as _partial_eval
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

__all__ = [
    "Primitive", "ad", "batching", "dce", "match_varying_axes", "mlir", "partitioned_by_xla", "register_dce",
    "result_aval", "unfused",
]  # fmt: skip

_insert_varying: Callable[..., Sequence[Any]] = next(
    getattr(_core, name)
    for name in ("auto_insert_reshard", "standard_insert_pvary", "standard_insert_pbroadcast")
    if hasattr(_core, name)
)


def match_varying_axes(*operands: jax.Array) -> Sequence[jax.Array]:
    """Inside `shard_map`, make operands vary over the same mesh axes (a no-op anywhere else)."""
    return _insert_varying(*operands)


def unfused(value: jax.Array) -> jax.Array:
    """The value, kept out of fusions by jaxlib 0.7.0, whose CPU compiler turns some sums of einsums into wrong numbers.

    Seen on the gradient of x of an `uvuv` product with several paths; jaxlib 0.7.1 and later are right.
    """
    return jax.lax.optimization_barrier(value) if jax.__version_info__ < (0, 7, 1) else value


def result_aval(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """Abstract value of a result, varying over the mesh axes over which the operand `like` varies."""
    # The mesh comes from the operand: inside `shard_map` a result that varies over axes must belong to their mesh.
    sharding = jax.sharding.NamedSharding(like.sharding.mesh, jax.sharding.PartitionSpec(*[None] * len(shape)))
    return like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def partitioned_by_xla(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether a lowering is part of a program that XLA itself divides among devices: `jit` with sharded arguments.

    It cannot divide a custom call: it would gather all operands on every device. Inside `shard_map` nothing is left
    for it to divide.
    """
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.ShardingContext):
        return context.num_devices > 1
    if isinstance(context, mlir.SPMDAxisContext):
        return not context.manual_axes >= set(context.mesh.axis_names)
    return False


def register_dce(primitive: Primitive, rule: Callable[[list[bool], Any], tuple[list[bool], Any]]) -> None:
    """Install a dead-code elimination rule: (used outputs, equation) -> (used inputs, smaller equation or None)."""
    _partial_eval.dce_rules[primitive] = rule


def dce(jaxpr: Any) -> Any:
    """A jaxpr without what its results do not need, as `jax.jit` lowers it."""
    return _partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)[0]
