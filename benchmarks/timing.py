"""Device time of one call, the same way for every implementation.

Asynchronous dispatch costs the host about 40 us a call, more than the shortest kernels here take, so a wall clock
around single calls would measure the host. Instead one program makes many calls in a loop with a known trip count:

    token = 0
    repeat:  operands, token = barrier(operands, token)
             results = barrier(f(operands))
             token += first element of each result

The first barrier makes every operand (indices too) depend on the call before, so that nothing can be hoisted out of
the loop or merged with another call; the second makes every result exist in full. Both vanish before code is made: no
copies. What remains of the loop is one kernel that reads an element of each result, about 2 us a call, and it is
counted in everyone's time.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Timing:
    """Median milliseconds a call, the spread of the blocks as a share of it, and how many calls one block made."""

    ms: float
    spread: float
    calls: int


def looped(function: Callable[..., tuple[jax.Array, ...]], calls: int) -> Callable[..., jax.Array]:
    """A program that calls ``function`` one after the other, ``calls`` times, and returns one number."""

    def program(*operands: jax.Array) -> jax.Array:
        def body(_: Any, token: jax.Array) -> jax.Array:
            fresh, token = jax.lax.optimization_barrier((operands, token))
            results = jax.lax.optimization_barrier(tuple(function(*fresh)))
            return token + sum(result[(0,) * result.ndim].astype(token.dtype) for result in results)

        return jax.lax.fori_loop(0, calls, body, jnp.zeros((), jnp.float32))

    return program


def calls_for(floor_ms: float, target_ms: float = 6.0) -> int:
    """Calls in one program: enough that its own dispatch (about 0.05 ms) stays under 1 % of it."""
    return int(np.clip(target_ms / floor_ms, 4, 100))


def measure(program: Callable[..., Any], operands: tuple[jax.Array, ...], calls: int) -> Timing:
    """Times blocks of two programs back to back, after two that warm up, and takes the median block."""
    jax.block_until_ready(program(*operands))
    start = time.perf_counter()
    jax.block_until_ready(program(*operands))
    slow = time.perf_counter() - start > 0.3
    repeats, blocks = (1, 2) if slow else (2, 7)
    times: list[float] = []
    for _ in range(blocks):
        start = time.perf_counter()
        results = [program(*operands) for _ in range(repeats)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) / (repeats * calls) * 1e3)
    median = float(np.median(times))
    return Timing(median, (max(times) - min(times)) / median, calls)


def measure_dispatched(function: Callable[..., Any], operands: tuple[jax.Array, ...], calls: int = 20) -> float:
    """Milliseconds a call of plain asynchronous calls: a cross-check, right only for calls over 0.1 ms."""
    jax.block_until_ready(function(*operands))
    times: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        results = None
        for _ in range(calls):
            results = function(*operands)  # each result is freed by the next: they may be gigabytes
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) / calls * 1e3)
    return float(np.median(times))


def loop_faults(text: str) -> list[str]:
    """What would make a time wrong, read off the loop's compiled HLO: a loop that is gone, or work taken out of it."""
    if " while(" not in text:
        return ["no loop left in the program"]
    outside = [line for line in _entry(text).splitlines() if " custom-call(" in line and "AllocateBuffer" not in line]
    return [f"{len(outside)} custom calls outside the loop"] if outside else []


def loop_copies(text: str, operands: tuple[jax.Array, ...]) -> int:
    """Copies inside the loop that are as large as an operand of two axes: none are expected of a fused kernel."""
    shapes = {",".join(map(str, operand.shape)) for operand in operands if operand.ndim > 1}
    copied = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text.replace(_entry(text), ""))
    return sum(shape in shapes for shape in copied)


def _entry(text: str) -> str:
    entry = text[text.find("\nENTRY") :]
    return entry[: entry.find("\n}")]
