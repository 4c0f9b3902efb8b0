"""Faults in kernel text are found and named: divergence, bad accesses, endless loops, races."""

import numpy as np
import pytest

from tests import emulator
from tests._emulator_kernels import BLOCK_SUM, ORDERS, SHUFFLES, TEAM, TWO_LAUNCHES, fault_of, kernel
from tests.emulator import Launch, compiler, run_standalone


def test_dropped_barrier_shows_in_some_order_and_as_a_race() -> None:
    dropped = BLOCK_SUM.replace("    __syncthreads();\n", "")
    x = np.arange(64.0)
    totals = []
    for order in ORDERS:
        with emulator.settings(order=order):
            totals.append(emulator.call(dropped, [Launch("k", 64, 512)], [x], [((1,), np.float64)], [64])[0][0])
    assert any(total != x.sum() for total in totals)
    run = run_standalone(dropped, [Launch("k", 64, 512)], [x, np.zeros(1)], [64], sanitize="thread")
    assert run.returncode == 66
    assert "data race" in run.stderr and "kernel.cu:9" in run.stderr
    whole = run_standalone(BLOCK_SUM, [Launch("k", 64, 512, 3)], [x, np.zeros(3)], [64], sanitize="thread")
    assert (whole.returncode, whole.stderr) == (0, "")
    np.testing.assert_array_equal(whole.buffers[1], [x.sum()] * 3)


def test_named_barrier_that_lacks_a_warp_or_orders_nothing() -> None:
    x = np.arange(96, dtype=np.int32)
    run = lambda source: fault_of(source, [Launch("k", 96, 256)], [x], [((96,), np.int32)])  # noqa: E731
    assert "barrier divergence: 64 threads wait" in run(TEAM.replace("(5, 64)", "(5, 96)"))
    assert "names are 1 to 15, threads whole warps" in run(TEAM.replace("(5, 64)", "(16, 64)"))
    first = TEAM.replace("    host::sync_some(5, 64);\n    z[", "    z[")
    assert first != TEAM
    for source, expected in ((TEAM, 0), (first, 66)):
        found = run_standalone(source, [Launch("k", 96, 256)], [x, np.zeros(96, np.int32)], [], sanitize="thread")
        assert found.returncode == expected and ("data race" in found.stderr) == (expected != 0)


@pytest.mark.parametrize(
    "body, expected",
    [
        (
            "  if (threadIdx.x < 40) {\n    __syncthreads();\n  } else {\n    __syncthreads();\n  }",
            ["barrier divergence", "40 threads wait at __syncthreads() on line 5", "24 threads", "on line 7"],
        ),
        (
            "  if (threadIdx.x < 10) return;\n  __syncthreads();",
            ["barrier divergence", "54 threads wait at __syncthreads() on line 5", "10 threads have returned"],
        ),
        (
            "  if (threadIdx.x & 16) __shfl_xor_sync(0xffffffffu, 1.0f, 16);\n  __syncthreads();",
            ["deadlock", "32 threads wait at __shfl_xor_sync(mask 0xffffffff) on line 4", "warp 0 lacks lanes 0-15"],
        ),
        (
            "  if (threadIdx.x == 37) return;\n  __syncwarp();",
            ["deadlock", "__syncwarp(mask 0xffffffff) on line 5", "threads have returned", "warp 1 lacks lanes 5"],
        ),
        (
            "  if (threadIdx.x & 1)\n    __shfl_sync(0xffffffffu, 1, 0);\n  else\n    __syncwarp();",
            ["meet at different operations", "__syncwarp(mask 0xffffffff) on line 7", "__shfl_sync", "line 5"],
        ),
        ("  __shfl_sync(0x0000ffffu, 1, 0);", ["lane 16", "__shfl_sync(mask 0x0000ffff) on line 4", "not in the mask"]),
        (
            "  if (threadIdx.x < 16) __shfl_sync(0x0000ffffu, 1, 20);",
            ["lane 0 reads lane 20, which is not in the mask", "on line 4"],
        ),
    ],
    ids=[
        *("two_barriers", "early_return", "half_warp", "lane_gone", "two_operations"),
        *("not_in_mask", "source_not_in_mask"),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_divergence_is_named(body: str, expected: list[str], order: str) -> None:
    if order != "forward":
        expected = [text for text in expected if not text.startswith("lane ")]
    with emulator.settings(order=order):
        text = fault_of(kernel(body, buffers=1), [Launch("k", 64, 0, 2)], [], [((1,), np.float32)])
    for part in ["test of the emulator", "kernel 'k', block", *expected]:
        assert part in text


@pytest.mark.parametrize(
    "body, expected",
    [
        ("  z[0] = x[8];", "invalid address: 0 bytes past the end of buffer 0 (32 bytes)"),
        ("  z[0] = x[1000 + blockIdx.x];", "invalid address: 3968 bytes past the end of buffer 0 (32 bytes)"),
        ("  z[0] = x[-1100];", "bytes before the start of buffer 0 (32 bytes)"),
        ("  ((float*)x)[2] = 1.0f;", "a store into buffer 0 (32 bytes), which is an operand"),
        ("  z[0] = *(const float*)(args.sizes[0] * 4096);", "far from every buffer"),
        ("  z[5] = 0.0f;", "wrote beside buffer 1 (20 bytes)"),
        ("  z[-1] = 0.0f;", "wrote beside buffer 1 (20 bytes)"),
        ("  ((float*)shared_memory)[2] = 0.0f;", "wrote past the end of dynamic shared memory (8 bytes)"),
        ("  *(float4*)(z + 1) = make_float4(0, 0, 0, 0);", "misaligned address on line 6, column"),
        ("  z[0] = ((const float4*)(x + 2))->x;", "type 'const struct float4' needs alignment 16, the address is a m"),
        ("  float v[4] = {x[0]};\n  z[0] = v[threadIdx.x + 4];", "index 4 is outside 'float [4]' on line 7"),
        ("  z[0] = (int)x[0] / (int)(args.sizes[0] - 5);", "integer division by zero"),
    ],
    ids=lambda text: None if " " in text else text,
)
def test_bad_accesses_are_named(body: str, expected: str) -> None:
    text = "  const float* x = (const float*)args.buffers[0];\n  float* z = (float*)args.buffers[1];\n" + body
    operands, results = [np.zeros(8, np.float32)], [((5,), np.float32)]
    found = fault_of(kernel(text, buffers=2, sizes=1), [Launch("k", 1, 8)], operands, results, [5])
    assert expected in found
    # The process is none the worse.
    (z,) = emulator.call(BLOCK_SUM, [Launch("k", 32, 256)], [np.ones(8)], [((1,), np.float64)], [8])
    assert z[0] == 8


def test_endless_loop_ends() -> None:
    source = kernel("  while (*(volatile float*)args.buffers[0] != 1.0f) {}", buffers=1)
    with emulator.settings(seconds=1):
        text = fault_of(source, [Launch("k", 32)], [], [((1,), np.float32)])
    assert "endless loop: not done after 1 seconds (thread 0)" in text


@pytest.mark.parametrize(
    "body, expected",
    [
        ("  z[0] = x[8];", ["heap-buffer-overflow", "kernel.cu:6"]),
        ("  z[0] = x[-1];", ["heap-buffer-overflow", "kernel.cu:6"]),
        ("  z[5] = x[0];", ["heap-buffer-overflow", "kernel.cu:6"]),
        ("  z[0] = ((float*)shared_memory)[2];", ["use-after-poison", "kernel.cu:6"]),
        ("  __syncthreads();\n  z[0] = x[threadIdx.x];", ["heap-buffer-overflow", "kernel.cu:7"]),
        ("  if (threadIdx.x) __syncthreads();", ["barrier divergence", "on line 6"]),
    ],
    ids=["end", "start", "store", "shared", "after_barrier", "divergence"],
)
def test_address_sanitizer_finds_bad_accesses(body: str, expected: list[str]) -> None:
    text = "  const float* x = (const float*)args.buffers[0];\n  float* z = (float*)args.buffers[1];\n" + body
    buffers = [np.zeros(8, np.float32), np.zeros(5, np.float32)]
    run = run_standalone(kernel(text, buffers=2), [Launch("k", 32, 8)], buffers, sanitize="address")
    assert run.returncode != 0
    for part in expected:
        assert part in run.stderr


@pytest.mark.parametrize("order", ORDERS)
def test_address_sanitizer_accepts_what_is_right(order: str) -> None:
    x = np.arange(100, dtype=np.float32)
    buffers = [x, np.zeros(1, np.float32), np.zeros(8, np.float32)]
    launches = [Launch("parts", 64, 0, 8, True), Launch("total", 1)]
    run = run_standalone(TWO_LAUNCHES, launches, buffers, [100], sanitize="address", order=order, blocks=5)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.buffers[1][0] == x.sum() and np.count_nonzero(run.buffers[2]) == 2
    lanes = np.arange(64, dtype=np.int32)
    run = run_standalone(SHUFFLES, [Launch("k", 64)], [lanes, np.zeros((9, 64), np.int32)], order=order)
    assert (run.returncode, run.stderr) == (0, "")
    np.testing.assert_array_equal(run.buffers[1][0], lanes ^ 5)


@pytest.mark.parametrize(
    "body, is_race",
    [
        ("  s[threadIdx.x] = 1; __syncwarp(); z[threadIdx.x] = s[threadIdx.x ^ 1];", False),
        ("  s[threadIdx.x] = 1; __syncwarp(); z[threadIdx.x] = s[threadIdx.x ^ 32];", True),
        ("  s[threadIdx.x] = 1; __shfl_sync(~0u, 1, 0); z[threadIdx.x] = s[threadIdx.x ^ 1];", True),
        ("  s[threadIdx.x] = 1; __syncthreads(); z[threadIdx.x] = s[threadIdx.x ^ 32];", False),
        (
            "  for (int i = 2; i; --i) { s[threadIdx.x] = i; __syncthreads(); z[threadIdx.x] = s[63 - threadIdx.x]; }",
            True,
        ),
        ("  all[blockIdx.x * 64 + threadIdx.x] = 1;", False),
        ("  all[blockIdx.x + threadIdx.x * 2] = 1; if (blockIdx.x == 0 && threadIdx.x == 9) all[3] = 2;", True),
        ("  atomicAdd(all + threadIdx.x, 1);", False),
        ("  atomicAdd(all + threadIdx.x, 1); if (blockIdx.x * threadIdx.x == 9) all[3] = 1;", True),
        ("  __shared__ int t[64]; t[threadIdx.x] = 1; __syncthreads(); s[threadIdx.x] = t[63 - threadIdx.x];", False),
    ],
    ids=[
        *("syncwarp", "across_warps", "shuffle", "barrier", "loop_needs_two_barriers", "blocks_apart", "blocks_meet"),
        *("atomics", "atomic_and_store", "static_array"),
    ],
)
def test_thread_sanitizer_finds_races(body: str, is_race: bool) -> None:
    source = kernel(
        f"  int* all = (int*)args.buffers[0];\n  int* z = all + 64 * blockIdx.x;\n"
        f"  volatile int* s = (volatile int*)shared_memory;\n{body}",
        buffers=1,
    )
    launches = [Launch("k", 64, 256, 2)] * (1 if is_race else 2)  # Launches are in order.
    run = run_standalone(source, launches, [np.zeros(128, np.int32)], sanitize="thread")
    assert ("data race" in run.stderr) == is_race, run.stderr
    assert run.returncode == (66 if is_race else 0)


@pytest.mark.parametrize("sanitize, expected", [("address", "heap-buffer-overflow"), ("thread", "data race")])
def test_a_custom_call_under_a_sanitizer(sanitize: compiler.Sanitizer, expected: str) -> None:
    image = emulator.sanitized_image(sanitize)
    x, launches = np.arange(64.0), [Launch("k", 64, 512, 3, True)]
    with emulator.settings(blocks=2):
        (z,) = emulator.call([image(BLOCK_SUM)], launches, [x], [((3,), np.float64)], [64])
    np.testing.assert_array_equal(z, [x.sum(), x.sum(), np.nan])
    spoiled = BLOCK_SUM.replace("    __syncthreads();\n", "").replace("x + threadIdx.x", "x + threadIdx.x + 1")
    assert expected in fault_of([image(spoiled)], launches, [x], [((3,), np.float64)], [64])
