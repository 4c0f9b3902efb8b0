"""The custom call `jaxcg_launch`: its registration and its attributes.

Importing this module registers the handler for CUDA. That needs no backend and starts none, and it lets a program that
was exported elsewhere run in a process that does no more than import jaxcg.
"""

import hashlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.ffi
import numpy as np

from jaxcg._errors import JaxcgError, MissingLibraryError
from jaxcg.runtime.nvrtc import CompiledImage

TARGET = "jaxcg_launch"
_MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a call.

    Attributes:
        name: the kernel's name in the image.
        threads: threads per block, at most 1024.
        shared_bytes: dynamic shared memory per block.
        max_blocks: blocks of the grid; 0 leaves the launch out.
        persistent: the grid is no larger than one block a multiprocessor (each block then loops).
        early: the kernel may start before the one before it has ended, and waits for it by itself (sm_90 and later;
            elsewhere it starts afterwards). Not for the first.
    """

    name: str
    threads: int
    shared_bytes: int
    max_blocks: int
    persistent: bool
    early: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= 1024:
            raise JaxcgError.of("threads", expected="in [1, 1024]", received=self.threads)
        if not 0 <= self.max_blocks <= _MAX_BLOCKS:
            raise JaxcgError.of("max_blocks", expected=f"in [0, {_MAX_BLOCKS}]", received=self.max_blocks)


def call_attributes(
    images: Sequence[CompiledImage | bytes],
    digest: str,
    launches: Sequence[Launch],
    sizes: Sequence[int],
    zeroed: Sequence[int],
    problem: str,
) -> dict[str, Any]:
    """Attributes of one custom call, for ``jax.ffi.ffi_call(TARGET, ...)(*operands, **attributes)``.

    Every kernel gets one struct by value: pointers to the operands and results, in order, then ``sizes``.

    Args:
        images: machine code or PTX; the first whose kernels all load on the device is used.
        digest: a text that identifies what was compiled. The attribute of that name covers images and names too, so
            that in a process one digest never stands for two programs.
        launches: the kernels, in the order in which they run.
        sizes: integers handed to every kernel.
        zeroed: numbers of the results that are filled with zero bytes first.
        problem: what the call computes, for error messages.

    Returns:
        ``str``, ``bytes`` and int64 array values.

    >>> attributes = call_attributes([b"code"], "0" * 64, [Launch("f", 128, 0, 10, False)], [3], [], "a product")
    >>> attributes["launches"].tolist(), attributes["image_sizes"].tolist(), attributes["names"]
    ([128, 0, 10, 0, 0], [4], 'f')
    """
    blobs = [image.image if isinstance(image, CompiledImage) else image for image in images]
    names = "\n".join(launch.name for launch in launches)
    records = [
        number
        for launch in launches
        for number in (
            launch.threads,
            launch.shared_bytes,
            launch.max_blocks,
            int(launch.persistent),
            int(launch.early),
        )
    ]
    return {
        "digest": _digest(digest.encode(), names.encode(), *blobs),
        "images": b"".join(blobs),
        "image_sizes": _integers([len(blob) for blob in blobs]),
        "names": names,
        "launches": _integers(records),
        "sizes": _integers(sizes),
        "zeroed": _integers(zeroed),
        "problem": problem,
    }


def require_extension() -> ModuleType:
    """The compiled handler, which a lowering for CUDA needs.

    Raises:
        MissingLibraryError: it was not built, or does not load.
    """
    if _EXTENSION is None:
        raise MissingLibraryError.of(
            "jaxcg._cuda_ffi",
            expected=f"the compiled file _cuda_ffi*.so in {Path(__file__).parents[1]}",
            received=_EXTENSION_FAULT,
            fix="build it with `pip install .` in the source folder of jaxcg (needs a C++17 compiler, nothing of CUDA),"
            " or use impl='xla'",
        )
    return _EXTENSION


def _digest(*fields: bytes) -> str:
    whole = hashlib.sha256()
    for field in fields:
        whole.update(hashlib.sha256(field).digest())
    return whole.hexdigest()


def _integers(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def _load_extension() -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module("jaxcg._cuda_ffi"), ""
    except ImportError as error:
        return None, str(error)


_EXTENSION, _EXTENSION_FAULT = _load_extension()
if _EXTENSION is not None:
    jax.ffi.register_ffi_target(TARGET, _EXTENSION.handlers(), platform="CUDA")
