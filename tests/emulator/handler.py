"""The CPU handler of `jaxcg_launch`, and the lowering that makes the CPU platform use it."""

import contextlib
import ctypes
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxcg import _primitive
from jaxcg._jax_internals import mlir
from jaxcg.runtime.launch import Compiler
from jaxcg.schedule import DeviceLimits

from .compiler import SOURCES, compile_once, image
from .standalone import ORDERS, Launch

_REPOSITORY = SOURCES.parent.parent


@dataclass(frozen=True)
class _Settings:
    blocks: int = 3
    order: str = "forward"
    seed: int = 0
    seconds: int = 60


_in_force = [_Settings()]


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    include, cuda_ffi = Path(jax.ffi.include_dir()), _REPOSITORY / "cuda_ffi"
    # The attributes are read by the CUDA handler's own code, so that its checks run here too.
    sources = [SOURCES / "handler.cc", SOURCES / "subprocess.cc", cuda_ffi / "call.cc"]
    headers = [
        SOURCES / "scheduler.h",
        SOURCES / "subprocess.h",
        cuda_ffi / "call.h",
        *sorted((include / "xla/ffi/api").glob("*.h")),
    ]
    flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared"]
    flags += [f"-I{path}" for path in (SOURCES, cuda_ffi, include)] + ["-ldl"]
    return ctypes.CDLL(str(compile_once(".so", flags, sources, headers)))


@lru_cache(maxsize=1)
def register() -> None:
    """Build the handler and register it as ``jaxcg_launch`` for the CPU; once per process."""
    jax.devices("cpu")  # The backend first: a handler is registered with it.
    jax.ffi.register_ffi_target("jaxcg_launch", jax.ffi.pycapsule(_library().jaxcg_launch_cpu), platform="cpu")


def _configure(chosen: _Settings) -> None:
    # What was dispatched before must run under the settings that held then.
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):  # Its owner meets the error.
            array.block_until_ready()
    _library().jaxcg_configure(chosen.blocks, ORDERS.index(chosen.order), ctypes.c_uint(chosen.seed), chosen.seconds)


@contextlib.contextmanager
def settings(
    *, blocks: int | None = None, order: str | None = None, seed: int | None = None, seconds: int | None = None
) -> Iterator[None]:
    """How launches run, for the calls inside. What is not given stays as it was.

    Args:
        blocks: how many blocks of a persistent launch are resident (at first 3).
        order: ``"forward"``, ``"reverse"`` or ``"shuffled"``, of threads and of blocks.
        seed: of ``"shuffled"``.
        seconds: after which a launch counts as an endless loop (at first 60).

    Raises:
        ValueError: there is no such order.
    """
    if order is not None and order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    register()
    previous = _in_force[-1]
    given = {"blocks": blocks, "order": order, "seed": seed, "seconds": seconds}
    _in_force.append(dataclasses.replace(previous, **{name: new for name, new in given.items() if new is not None}))
    _configure(_in_force[-1])
    try:
        yield
    finally:
        _in_force.pop()
        _configure(previous)


_lowerings: list[Callable[..., Any]] = [_primitive.lower_xla]


def _lower_with(lowering: Callable[..., Any]) -> None:
    # A function traced or compiled under the one lowering must not be found again under the other.
    jax.clear_caches()
    mlir.register_lowering(_primitive.product_p, lowering, platform="cpu")


@contextlib.contextmanager
def emulated(compile_source: Callable[[str], bytes] = image, limits: DeviceLimits | None = None) -> Iterator[None]:
    """Inside, programs for the CPU take the path of the GPU: kernels, through the custom call, on the emulator.

    Clears JAX's caches on the way in and out. A compiled program keeps the path it was compiled for.

    Args:
        compile_source: kernel text to the attribute `images`. `sanitized_image` runs every call in a process of its
            own, under a sanitizer; a test of the tests spoils the text.
        limits: what schedules may use; as on the smallest GPU if left out.
    """
    register()
    compiler = Compiler(lambda source: [compile_source(source.text)], limits or DeviceLimits())
    lowering = _primitive.kernel_lowering(lambda ctx: compiler)
    _lowerings.append(lowering)
    _lower_with(lowering)
    try:
        yield
    finally:
        _lowerings.pop()
        _lower_with(_lowerings[-1])


def attributes(
    launches: Sequence[Launch], images: Sequence[bytes], sizes: Sequence[int] = (), zeroed: Sequence[int] = ()
) -> dict[str, Any]:
    """The custom call's attributes."""
    return {
        "digest": hashlib.sha256(b"\0".join(images)).hexdigest(),
        "images": b"".join(images),
        "image_sizes": np.array([len(part) for part in images], np.int64),
        "names": "\n".join(launch.name for launch in launches),
        "launches": np.array([launch.record() for launch in launches], np.int64).reshape(-1),
        "sizes": np.array(sizes, np.int64),
        "zeroed": np.array(zeroed, np.int64),
        "problem": "test of the emulator",
    }


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """float64 and int64 inside. (`jax.enable_x64` is not in every JAX that is tested.)"""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def call(
    source: str | Sequence[bytes],
    launches: Sequence[Launch],
    operands: Sequence[np.ndarray[Any, Any]],
    results: Sequence[tuple[tuple[int, ...], Any]],
    sizes: Sequence[int] = (),
    zeroed: Sequence[int] = (),
) -> list[np.ndarray[Any, Any]]:
    """Run kernel text through the custom call, without the library.

    Args:
        source: the text, or images.
        launches: run in order.
        operands: the arrays it reads.
        results: shape and dtype of each array it writes.
        sizes: the integers of `Args`.
        zeroed: which results start as zeros; the others start as not a number.

    Raises:
        jax.errors.JaxRuntimeError: an attribute is wrong or a launch failed, and why.
    """
    register()
    images = [image(source)] if isinstance(source, str) else source
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    with double_precision():
        made = jax.ffi.ffi_call("jaxcg_launch", shapes)(*operands, **attributes(launches, images, sizes, zeroed))
        return [np.asarray(array) for array in made]
