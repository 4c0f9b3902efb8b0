"""The CUDA handler over the real driver, with small kernels of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.ffi
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcg.runtime import cache, ffi, nvrtc
from jaxcg.runtime.ffi import Launch, call_attributes

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[1]
KERNELS = """struct Args { void* buffers[2]; long long sizes[2]; };
extern "C" __global__ void add(const Args args) {
  const long long count = args.sizes[0], added = args.sizes[1];
  const float* from = static_cast<const float*>(args.buffers[0]);
  float* to = static_cast<float*>(args.buffers[1]);
  const long long step = gridDim.x * (long long)blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step)
    to[i] += from[i] + added;
}
extern "C" __global__ void grid(const Args args) {
  if (blockIdx.x == 0 && threadIdx.x == 0) static_cast<float*>(args.buffers[1])[0] = gridDim.x;
}
extern "C" __global__ void shared(const Args args) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  float* row = reinterpret_cast<float*>(shared_memory);
  const long long last = args.sizes[1] - 1;
  if (threadIdx.x == 0) row[last] = static_cast<const float*>(args.buffers[0])[0];
  __syncthreads();
  if (threadIdx.x == 1) static_cast<float*>(args.buffers[1])[0] = row[last];
}
"""


def compile_images() -> list[nvrtc.CompiledImage]:
    devices = jax.devices("gpu")
    return [
        cache.compile_cached(KERNELS, target)
        for target in nvrtc.targets([device.compute_capability for device in devices])
    ]


def run_call(x: jax.Array, run: list[Launch], added: int = 0, images: Any = None) -> jax.Array:
    sizes = [x.size, added]
    attributes = call_attributes(images or compile_images(), "text", run, sizes, [0], "a product")
    return jax.ffi.ffi_call(ffi.TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, **attributes)


def test_results_under_capture_and_replay() -> None:
    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        # Seven calls: more than the five from which XLA makes a CUDA graph.
        for _ in range(7):
            x = run_call(x, [Launch("add", 128, 0, 64, False), Launch("add", 128, 0, 3, True)], 1)
        return x

    kept = []
    for start in range(6):
        x = np.arange(1000, dtype=np.float32) + start
        kept.append((x, chain(x)))
    for x, z in kept:
        for _ in range(7):
            x = 2 * x + 2
        np.testing.assert_array_equal(z, x)


def test_persistent_grid_is_one_block_a_multiprocessor() -> None:
    x = jnp.zeros(1, jnp.float32)
    multiprocessors = run_call(x, [Launch("grid", 1024, 200_000, 100_000, True)])[0]
    assert 1 < multiprocessors < 1000
    assert run_call(x, [Launch("grid", 32, 0, 100_000, True)])[0] == multiprocessors
    assert run_call(x, [Launch("grid", 32, 0, 5, True)])[0] == 5
    assert run_call(x, [Launch("grid", 32, 0, 100_000, False)])[0] == 100_000


def test_shared_memory_to_the_limit_of_the_device() -> None:
    x = jnp.full(1, 7, jnp.float32)
    words = 163 * 1024 // 4  # 163 KB a block on sm_80, 227 KB on sm_90.
    assert run_call(x, [Launch("shared", 32, 4 * words, 1, False)], words)[0] == 7


def test_block_too_large_for_the_device_lists_its_resources() -> None:
    with pytest.raises(Exception, match=r"\(a product\): kernel shared \(32 threads of \d+ registers, 400000"):
        jax.block_until_ready(run_call(jnp.zeros(1, jnp.float32), [Launch("shared", 32, 400_000, 1, False)], 1))


def test_struct_of_another_size_is_refused() -> None:
    attributes = call_attributes(compile_images(), "text", [Launch("add", 32, 0, 1, False)], [1], [], "a product")
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT.*takes 32 bytes of arguments"):
        x = jnp.zeros(1, jnp.float32)
        jax.block_until_ready(jax.ffi.ffi_call(ffi.TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, **attributes))


def test_zero_rows() -> None:
    assert run_call(jnp.zeros((0, 3), jnp.float32), [Launch("add", 32, 0, 0, False)]).shape == (0, 3)


def test_more_than_two_billion_bytes() -> None:
    x = jnp.ones(2**29 + 8, jnp.float32)
    z = run_call(x, [Launch("add", 256, 0, 4096, True)], 1)
    assert z[-1] == 2
    assert jnp.all(z == 2)


def test_images_of_other_architectures_are_passed_over() -> None:
    images = [cache.compile_cached(KERNELS, target) for target in ("sm_80", "sm_100", "sm_90")]
    x = jnp.arange(5, dtype=jnp.float32)
    np.testing.assert_array_equal(run_call(x, [Launch("add", 32, 0, 1, False)], 1, images), x + 1)


def test_no_image_that_fits_fails_at_compilation() -> None:
    images = [cache.compile_cached(KERNELS, "sm_75")]
    function = jax.jit(lambda x: run_call(x, [Launch("add", 32, 0, 1, False)], 1, images))
    lowered = function.lower(jnp.zeros(5, jnp.float32))
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT.*no image of this program runs.*image 1 of 1"):
        lowered.compile()


def test_assembled_by_the_driver() -> None:
    images = [cache.compile_cached(KERNELS, "compute_80")]
    x = jnp.arange(5, dtype=jnp.float32)
    np.testing.assert_array_equal(run_call(x, [Launch("add", 32, 0, 1, False)], 1, images), x + 1)


def test_exported_program_needs_no_more_than_the_import(tmp_path: Path) -> None:
    targets = ("sm_80", "sm_90", "sm_100")
    images = [cache.compile_cached(KERNELS, target) for target in targets]
    checks = [jax.export.DisabledSafetyCheck.custom_call(ffi.TARGET)]
    function = jax.jit(lambda x: run_call(x, [Launch("add", 32, 0, 1, False)], 1, images))
    exported = jax.export.export(function, platforms=["cuda"], disabled_checks=checks)(jnp.zeros(5, jnp.float32))
    (tmp_path / "program").write_bytes(exported.serialize())
    script = """
import pathlib, sys
import jax, jax.export
import jaxcg
program = jax.export.deserialize(bytearray(pathlib.Path(sys.argv[1]).read_bytes()))
assert program.call(jax.numpy.arange(5, dtype="float32")).tolist() == [1, 2, 3, 4, 5]
"""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-c", script, str(tmp_path / "program")]
    subprocess.run(command, check=True, timeout=120, cwd=ROOT, env=environment)
