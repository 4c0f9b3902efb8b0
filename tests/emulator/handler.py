"""The CPU handler of `jaxcg_launch`, and the lowering that makes the CPU platform use it."""

import contextlib
import ctypes
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import jax
import numpy as np

from .build import SOURCES, compile_once
from .standalone import ORDERS

_REPOSITORY = SOURCES.parent.parent
_defaults = (3, "forward", 0, 60)
_settings = [_defaults]


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    include, cuda_ffi = Path(jax.ffi.include_dir()), _REPOSITORY / "cuda_ffi"
    # The attributes are read by the CUDA handler's own code, so that its checks run here too.
    sources = [SOURCES / "handler.cc", cuda_ffi / "call.cc"]
    headers = [SOURCES / "scheduler.h", cuda_ffi / "call.h", *sorted((include / "xla/ffi/api").glob("*.h"))]
    flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-fvisibility=hidden"]
    flags += [f"-I{path}" for path in (SOURCES, cuda_ffi, include)] + ["-ldl"]
    return ctypes.CDLL(str(compile_once(".so", flags, sources, headers)))


@lru_cache(maxsize=1)
def register() -> None:
    """Build the handler and register it as ``jaxcg_launch`` for the CPU; once per process."""
    jax.devices("cpu")  # The backend first: a handler is registered with it.
    jax.ffi.register_ffi_target("jaxcg_launch", jax.ffi.pycapsule(_library().jaxcg_launch_cpu), platform="cpu")


def _configure(blocks: int, order: str, seed: int, seconds: int) -> None:
    # What was dispatched before must run under the settings that held then.
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):  # Its owner meets the error.
            array.block_until_ready()
    _library().jaxcg_configure(blocks, ORDERS.index(order), ctypes.c_uint(seed), seconds)


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
    """
    register()
    given = (blocks, order, seed, seconds)
    previous = _settings[-1]
    chosen = tuple(old if new is None else new for new, old in zip(given, previous, strict=True))
    if chosen[1] not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {chosen[1]!r}")
    _settings.append(chosen)  # type: ignore[arg-type]
    _configure(*chosen)  # type: ignore[arg-type]
    try:
        yield
    finally:
        _settings.pop()
        _configure(*previous)
