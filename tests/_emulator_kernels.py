"""Kernels small enough to see what each must give, for the tests of the emulator."""

from typing import Any

import jax
import pytest

from tests import emulator

ORDERS = ("forward", "reverse", "shuffled")


def kernel(body: str, *, buffers: int, sizes: int = 0, name: str = "k", bounds: str = "") -> str:
    """Kernel text with one entry point; `body` begins on line 4."""
    integers = f" long long sizes[{sizes}];" if sizes else ""
    return (
        f"struct Args {{ void* buffers[{buffers}];{integers} }};\n"
        "extern __shared__ __align__(16) unsigned char shared_memory[];\n"
        f'extern "C" __global__ void {bounds} {name}(const Args args) {{\n{body}\n}}\n'
    )


def fault_of(*args: Any, **kwargs: Any) -> str:
    """The error text of `emulator.call`, which must fail."""
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        emulator.call(*args, **kwargs)
    return str(caught.value)


BLOCK_SUM = kernel(
    """  const double* x = (const double*)args.buffers[0];
  double* z = (double*)args.buffers[1];
  double* partial = (double*)shared_memory;
  partial[threadIdx.x] = threadIdx.x < args.sizes[0] ? __ldg(x + threadIdx.x) : 0.0;
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  if (threadIdx.x == 0) z[blockIdx.x] = partial[0];""",
    buffers=2,
    sizes=1,
)

SHUFFLES = kernel(
    """  const int* x = (const int*)args.buffers[0];
  int* z = (int*)args.buffers[1] + threadIdx.x;
  const int value = x[threadIdx.x];
  z[0] = __shfl_xor_sync(0xffffffffu, value, 5);
  z[64] = __shfl_sync(0xffffffffu, value, 7);
  z[128] = __shfl_down_sync(0xffffffffu, value, 3, 8);
  z[192] = __shfl_up_sync(0xffffffffu, value, 2);
  z[256] = (int)__ballot_sync(0xffffffffu, value > 10);
  z[320] = __any_sync(0xffffffffu, value == 3);
  z[384] = __all_sync(0xffffffffu, value < 40);
  const unsigned mask = (threadIdx.x & 16) ? 0xffff0000u : 0x0000ffffu;
  z[448] = __shfl_xor_sync(mask, value, 1);
  double sum = value;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  __syncwarp();
  z[512] = (int)sum;""",
    buffers=2,
)

TWO_LAUNCHES = """struct Args { void* buffers[3]; long long sizes[1]; };
extern "C" __global__ void __launch_bounds__(64) parts(const Args args) {
  const float* x = (const float*)args.buffers[0];
  float* scratch = (float*)args.buffers[2];
  float sum = 0.0f;
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < args.sizes[0]; i += step) sum += __ldcs(x + i);
  atomicAdd(scratch + blockIdx.x, sum);
}
extern "C" __launch_bounds__(1) __global__ void unused(const Args args) {}
extern "C" __global__ void __launch_bounds__(1, 2) total(const Args args) {
  float sum = 0.0f;
  for (int block = 0; block < 8; ++block) sum += __ldcg((const float*)args.buffers[2] + block);
  __stcs((float*)args.buffers[1], sum);
}
"""

# Warps 0 and 1 exchange numbers through shared memory and meet at a named barrier twice, warp 2 at none.
TEAM = kernel(
    """  const int* x = (const int*)args.buffers[0];
  int* z = (int*)args.buffers[1];
  int* shared = (int*)shared_memory;
  if (threadIdx.x >= 64) {
    z[threadIdx.x] = -1;
    return;
  }
  for (int turn = 0; turn < 3; ++turn) {
    shared[threadIdx.x] = x[threadIdx.x] + turn;
    host::sync_some(5, 64);
    z[threadIdx.x] = shared[63 - threadIdx.x];
    host::sync_some(5, 64);
  }""",
    buffers=2,
)
