"""From one call of the primitive to its custom call: schedule, text, image, attributes."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxcg._errors import UnsupportedError
from jaxcg._primitive import Call
from jaxcg._terms import TermSet
from jaxcg.codegen import KernelSource, generate
from jaxcg.runtime import cache, ffi, nvrtc
from jaxcg.schedule import DeviceLimits, choose

# A block takes at least this many edges, or its start and the fix-up of its first receiver dominate.
_EDGES_PER_BLOCK = 4
_MOST_ROWS = 2**31 - 1

Compiler = Callable[[KernelSource], Sequence[nvrtc.CompiledImage | bytes]]


@lru_cache(maxsize=1024)
def source_of(
    call_key: tuple[Any, ...], terms: TermSet, itemsize: int, limits: DeviceLimits = DeviceLimits()
) -> KernelSource:
    """The text of a call; it depends on the product and the kind of call, never on the size of the graph."""
    coupling, indexed, ordered = call_key
    schedule = choose(coupling, terms, itemsize, limits)
    return generate(coupling, terms, schedule, indexed=indexed, ordered=ordered, itemsize=itemsize)


def kernel_source(call: Call, terms: TermSet, itemsize: int) -> KernelSource:
    """The text that `call` runs."""
    return source_of((call.coupling, call.indexed, call.ordered), terms, itemsize)


def targets_of(ctx: Any) -> tuple[str, ...]:
    """What to compile for: the devices of this process, or one target an architecture family for an export."""
    if not ctx.module_context.lowering_parameters.for_export:
        try:
            capabilities = sorted({device.compute_capability for device in jax.local_devices(backend="cuda")})
        except RuntimeError:  # lowering for a platform that this process does not have
            capabilities = []
        if capabilities:
            return nvrtc.targets(capabilities)
    return nvrtc.targets(())


def compile_for(targets: Sequence[str]) -> Compiler:
    """A compiler of texts by NVRTC, through the cache on disk."""
    return lambda source: [cache.compile_cached(source.text, target) for target in targets]


def custom_call(call: Call, terms: TermSet, compiler: Compiler) -> Callable[..., list[Array]]:
    """The call as a JAX function of the primitive's operands.

    Args:
        call: the call.
        terms: its term set.
        compiler: turns a text into images.

    Returns:
        A function to be lowered in place of the primitive: one ``jaxcg_launch`` custom call. Scratch memory is a
        result that is dropped, so XLA owns it.
    """
    if max(call.num_rows, call.num_x, call.num_z) > _MOST_ROWS:
        raise UnsupportedError(
            f"the kernels count rows in 32 bits, got {call.num_rows} edges, {call.num_x} and {call.num_z} nodes; "
            "split the graph or use impl='xla'"
        )

    def run(*operands: Array) -> list[Array]:
        dtype = operands[-1].dtype
        source = kernel_source(call, terms, dtype.itemsize)
        blocks = max(1, min(source.max_blocks, call.num_rows // _EDGES_PER_BLOCK))
        results = [jax.ShapeDtypeStruct(call.shape(out.slot), dtype) for out in terms.outputs]
        if source.scratch_rows:
            results.append(jax.ShapeDtypeStruct((source.scratch_rows, blocks, call.coupling.dim_out), dtype))
            results.append(
                jax.ShapeDtypeStruct((source.continued_size * (source.max_blocks + 1),), jnp.dtype(np.int32))
            )
        launches = [
            ffi.Launch(launch.name, launch.threads, launch.shared_bytes, blocks, launch.persistent)
            for launch in source.launches
        ]
        attributes = ffi.call_attributes(
            compiler(source),
            source.digest,
            launches,
            [call.num_rows, call.num_x, call.num_z, blocks],
            source.zeroed,
            f"{call!r} {terms!r}",
        )
        made = jax.ffi.ffi_call(ffi.TARGET, results)(*operands, **attributes)
        return list(made[: len(terms.outputs)])

    return run
