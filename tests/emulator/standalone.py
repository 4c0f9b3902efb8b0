"""Launches in a process of their own, under AddressSanitizer or ThreadSanitizer."""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .compiler import Sanitizer, build

ORDERS = ("forward", "reverse", "shuffled")


@dataclass(frozen=True)
class Launch:
    """One kernel launch, as one record of the attribute `launches`.

    Attributes:
        name: the kernel.
        threads: of one block.
        shared_bytes: of dynamic shared memory.
        max_blocks: grid size, or its bound if persistent. 0: left out.
        persistent: the grid is no larger than one block a multiprocessor.
        early: may start before the launch before it has ended (here it never does).
    """

    name: str
    threads: int
    shared_bytes: int = 0
    max_blocks: int = 1
    persistent: bool = False
    early: bool = False

    def record(self) -> list[int]:
        """The five integers of the attribute."""
        return [self.threads, self.shared_bytes, self.max_blocks, int(self.persistent), int(self.early)]


@dataclass(frozen=True)
class StandaloneResult:
    """What became of a run.

    Attributes:
        returncode: 0: all launches ran and the sanitizer found nothing. 3: a launch failed.
        stderr: the reason, or the sanitizer's report with lines of ``kernel.cu``, the kernel text.
        buffers: every buffer after the last launch, or as it was if a launch failed.
    """

    returncode: int
    stderr: str
    buffers: tuple[np.ndarray[Any, Any], ...]


def run_standalone(
    source: str,
    launches: Sequence[Launch],
    buffers: Sequence[np.ndarray[Any, Any]],
    sizes: Sequence[int] = (),
    *,
    sanitize: Sanitizer = "address",
    blocks: int = 3,
    order: str = "forward",
    seed: int = 0,
    timeout: float = 120.0,
) -> StandaloneResult:
    """Run kernel text under a sanitizer, in a process of its own.

    AddressSanitizer finds every access outside a buffer (each is allocated exactly), the dynamic shared memory or a
    local array. ThreadSanitizer finds two threads that touch the same global or shared memory, one of them storing,
    with no barrier, `__syncwarp` or end of launch in between, whatever the order they ran in; blocks of one launch
    are never ordered, shuffles and atomics order nothing.

    Args:
        source: the kernel text.
        launches: run in order.
        buffers: operands, then results with the contents they should start with.
        sizes: the integers of `Args`.
        sanitize: ``"address"`` or ``"thread"``.
        blocks: how many blocks of a persistent launch are resident.
        order: ``"forward"``, ``"reverse"`` or ``"shuffled"``, of threads and of blocks.
        seed: of ``"shuffled"``.
        timeout: in seconds, for the whole process.

    Raises:
        BuildError: the text does not compile.
        subprocess.TimeoutExpired: it did not end.
    """
    program = build(source, sanitize=sanitize)
    with tempfile.TemporaryDirectory() as scratch:
        lines = [f"order {ORDERS.index(order)} {seed} {int(timeout)}", *(f"size {size}" for size in sizes)]
        files = [Path(scratch) / f"buffer{number}" for number in range(len(buffers))]
        for file, buffer in zip(files, buffers, strict=True):
            file.write_bytes(np.ascontiguousarray(buffer).tobytes())
            lines.append(f"buffer {buffer.nbytes} {file}")
        for launch in launches:
            grid = min(launch.max_blocks, blocks) if launch.persistent else launch.max_blocks
            if grid > 0:
                lines.append(f"launch {launch.name} {launch.threads} {launch.shared_bytes} {grid}")
        request = Path(scratch) / "request"
        request.write_text("\n".join(lines) + "\n")
        environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "exitcode=66"}
        run = subprocess.run(
            [str(program), str(request)], capture_output=True, text=True, timeout=timeout, env=environment
        )
        contents = tuple(
            np.frombuffer(file.read_bytes(), buffer.dtype).reshape(buffer.shape)
            for file, buffer in zip(files, buffers, strict=True)
        )
    return StandaloneResult(run.returncode, run.stderr, contents)
