"""From one call of the primitive to its custom call: schedule, text, image, attributes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxcg._coupling import Coupling
from jaxcg._errors import UnsupportedError
from jaxcg._primitive import Call
from jaxcg._terms import TermSet, exchange, prune
from jaxcg.codegen import KernelSource, generate
from jaxcg.runtime import cache, ffi, nvrtc
from jaxcg.schedule import DeviceLimits, choose

# Counters of edges step past the last by up to two batches and a ring.
_MOST_ROWS = 2**31 - 128

# Shared memory of a multiprocessor, and the most that one block may have, by architecture (CUDA programming guide,
# compute capabilities). An architecture that is not listed gets the least of all since sm_80.
_SHARED = {80: (164, 163), 87: (164, 163), 90: (228, 227), 100: (228, 227), 103: (228, 227)}
_LEAST_SHARED = (100, 99)
# The most that a device of the architecture can have: 128 in A100, 144 in H100 and H200 (white papers; 108 and 132 are
# in use). More blocks than there are multiprocessors cost scratch memory and empty blocks of the fix-up.
_MULTIPROCESSORS = {80: 128, 90: 144}
_MOST_MULTIPROCESSORS = 192


@dataclass(frozen=True)
class Compiler:
    """How texts become images.

    Attributes:
        compile: from a text to its images, in the order in which they are tried.
        limits: what schedules may use on every device that an image is for.
    """

    compile: Callable[[KernelSource], Sequence[nvrtc.CompiledImage | bytes]]
    limits: DeviceLimits = field(default_factory=DeviceLimits)


@lru_cache(maxsize=1024)
def source_of(
    coupling: Coupling,
    indexed: bool,
    ordered: bool,
    terms: TermSet,
    itemsize: int,
    limits: DeviceLimits,
    compensated: bool = False,
) -> KernelSource:
    """The text of a call; it depends on the product and the kind of call, never on the size of the graph."""
    compensated &= indexed and any(out.slot == "z" for out in terms.outputs)
    schedule = choose(coupling, terms, itemsize, limits, compensated)
    return generate(coupling, terms, schedule, indexed=indexed, ordered=ordered, itemsize=itemsize)


def kernel_source(call: Call, terms: TermSet, itemsize: int, limits: DeviceLimits) -> KernelSource:
    """The text that `call` runs."""
    return source_of(call.coupling, call.indexed, call.ordered, terms, itemsize, limits, call.compensated)


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


def limits_of(targets: Sequence[str]) -> DeviceLimits:
    """What every one of the targets offers.

    >>> [limits_of(targets).shared_bytes for targets in (["sm_90"], ["sm_90", "sm_86"], ["compute_90"])]
    [232448, 101376, 101376]
    >>> [limits_of(targets).multiprocessors for targets in (["sm_90"], ["sm_90", "sm_86"], ["compute_90"])]
    [144, 192, 192]
    """
    # PTX is for devices that the compiler does not know.
    kinds = [target.partition("_") for target in targets]
    numbers = [int(number) if kind == "sm" else 0 for kind, _, number in kinds]
    total, block = min(_SHARED.get(number, _LEAST_SHARED) for number in numbers)
    return DeviceLimits(
        shared_bytes=1024 * block,
        shared_total=1024 * total,
        multiprocessors=max(_MULTIPROCESSORS.get(number, _MOST_MULTIPROCESSORS) for number in numbers),
    )


def compile_for(targets: Sequence[str]) -> Compiler:
    """A compiler of texts by NVRTC, through the cache on disk."""
    return Compiler(
        lambda source: [cache.compile_cached(source.text, target) for target in targets], limits_of(targets)
    )


def custom_call(call: Call, terms: TermSet, compiler: Compiler) -> Callable[..., list[Array]]:
    """The call as a JAX function of the primitive's operands.

    Args:
        call: the call.
        terms: its term set.
        compiler: turns texts into images.

    Returns:
        A function to be lowered in place of the primitive: one ``jaxcg_launch`` custom call, or two if gradients of x
        are summed sender by sender. Scratch memory is a result that is dropped, so XLA owns it.
    """
    if call.sums_by_sender and call.indexed and any(out.slot == "x" for out in terms.outputs):
        return partial(_without_atomics, call, terms, compiler)
    if call.by_sender:
        plain = custom_call(replace(call, by_sender=False), terms, compiler)
        return lambda *operands: plain(*operands[:3], *operands[4:])
    if max(call.num_rows, call.num_x, call.num_z) > _MOST_ROWS:
        raise UnsupportedError(
            f"the kernels count rows in 32 bits, got {call.num_rows} edges, {call.num_x} and {call.num_z} nodes; "
            "split the graph or use impl='xla'"
        )

    def run(*operands: Array) -> list[Array]:
        dtype = operands[-1].dtype
        source = kernel_source(call, terms, dtype.itemsize, compiler.limits)
        rows, coupling = call.num_rows, call.coupling
        pieces = source.rows_of_scratch(rows)
        results = [jax.ShapeDtypeStruct(call.shape(out.slot), dtype) for out in terms.outputs]
        if source.scratch_rows:
            results.append(jax.ShapeDtypeStruct((source.scratch_rows, pieces, coupling.dim_out), dtype))
            results.append(jax.ShapeDtypeStruct((source.marks,), jnp.dtype(np.int32)))
        if source.shares:
            results.append(jax.ShapeDtypeStruct((source.shares, rows, coupling.dim_in2), dtype))
        launches = [
            ffi.Launch(one.name, one.threads, one.shared_bytes, source.grid(one, rows), one.grid == "resident", n > 0)
            for n, one in enumerate(source.launches)
        ]
        attributes = ffi.call_attributes(
            compiler.compile(source),
            source.digest,
            launches,
            [rows, call.num_x, call.num_z, pieces],
            source.zeroed,
            f"{call!r} {terms!r}",
        )
        made = jax.ffi.ffi_call(ffi.TARGET, results)(*operands, **attributes)
        return list(made[: len(terms.outputs)])

    return run


def _without_atomics(call: Call, terms: TermSet, compiler: Compiler, *operands: Array) -> list[Array]:
    """The call with the gradients of x by a call of their own, over edges sorted by sender.

    With x and z exchanged, a gradient of x is a z: it is accumulated sender by sender, and written once. Each path
    writes a slot of its own, and the slots of an x block are summed afterwards.
    """
    indices, values = operands[: call.num_indices], operands[call.num_indices :]
    plain = replace(call, deterministic=False, by_sender=False)

    def part(used: list[bool], make: Callable[[TermSet], Callable[..., list[Array]]], *given: Array) -> list[Array]:
        if not any(used):
            return []
        smaller, read = prune(terms, used)
        return make(smaller)(*given, *(value for value, is_read in zip(values, read, strict=True) if is_read))

    is_x = [out.slot == "x" for out in terms.outputs]
    mine = indices[: plain.num_indices]
    others = part([not x for x in is_x], lambda smaller: custom_call(plain, smaller, compiler), *mine)
    senders, receivers = indices[:2]
    present = senders >= 0
    sources, targets = jnp.where(present, receivers, ~receivers), jnp.where(present, senders, ~senders)
    order = indices[3] if call.by_sender else jnp.argsort(targets, stable=True).astype(jnp.int32)
    turned = replace(plain, exchanged=True, ordered=True, num_x=call.num_z, num_z=call.num_x)
    slots = part(is_x, lambda smaller: custom_call(turned, exchange(smaller), compiler), sources, targets, order)
    gradients, rest = (_sum_slots(call.coupling, slot) for slot in slots), iter(others)
    return [next(gradients) if x else next(rest) for x in is_x]


def _sum_slots(coupling: Coupling, slots: Array) -> Array:
    """Sum the slot of each path onto the block of x that the path reads."""
    blocks: dict[int, Array] = {}
    at = 0
    for path in coupling.paths:
        size = path.mul1 * (2 * path.l1 + 1)
        slot = slots[:, at : at + size]
        at += size
        blocks[path.in1_offset] = blocks[path.in1_offset] + slot if path.in1_offset in blocks else slot
    filled: list[Array] = []
    end = 0
    for offset, block in sorted(blocks.items()):
        filled += [jnp.zeros((slots.shape[0], offset - end), slots.dtype), block]
        end = offset + block.shape[1]
    return jnp.concatenate([*filled, jnp.zeros((slots.shape[0], coupling.dim_in1 - end), slots.dtype)], axis=1)
