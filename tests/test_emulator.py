"""The host shim, by values, and the handler, through `jax.ffi`."""

import contextlib
import ctypes

import jax
import numpy as np
import pytest

import jaxcg
from tests import emulator
from tests._emulator_kernels import BLOCK_SUM, ORDERS, SHUFFLES, TEAM, TWO_LAUNCHES, fault_of, kernel
from tests.emulator import Launch, compiler, handler


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("threads", [32, 64, 256])
def test_block_sum_through_shared_memory(threads: int, order: str) -> None:
    x = np.arange(40.0)[:threads]
    with emulator.settings(order=order, seed=threads):
        (z,) = emulator.call(BLOCK_SUM, [Launch("k", threads, threads * 8, 2)], [x], [((2,), np.float64)], [len(x)])
    np.testing.assert_array_equal(z, [x.sum()] * 2)


@pytest.mark.parametrize("order", ORDERS)
def test_some_warps_meet_at_a_named_barrier(order: str) -> None:
    x = np.arange(96, dtype=np.int32)
    with emulator.settings(order=order):
        (z,) = emulator.call(TEAM, [Launch("k", 96, 256)], [x], [((96,), np.int32)])
    np.testing.assert_array_equal(z, [*(63 - x[:64] + 2), *[-1] * 32])


@pytest.mark.parametrize("order", ORDERS)
def test_warp_operations(order: str) -> None:
    x = np.random.default_rng(0).permutation(64).astype(np.int32)
    with emulator.settings(order=order):
        (z,) = emulator.call(SHUFFLES, [Launch("k", 64)], [x], [((9, 2, 32), np.int32)])
    x, lane = x.reshape(2, 32), np.arange(32)
    np.testing.assert_array_equal(z[0], x[:, lane ^ 5])
    np.testing.assert_array_equal(z[1], x[:, [7] * 32])
    np.testing.assert_array_equal(z[2], x[:, np.where(lane % 8 < 5, lane + 3, lane)])
    np.testing.assert_array_equal(z[3], x[:, np.where(lane < 2, lane, lane - 2)])
    ballot = ((x > 10) * (1 << lane.astype(np.int64))).sum(1).astype(np.uint32).view(np.int32)
    np.testing.assert_array_equal(z[4], np.broadcast_to(ballot[:, None], (2, 32)))
    np.testing.assert_array_equal(z[5][:, 0], (x == 3).any(1))
    np.testing.assert_array_equal(z[6][:, 0], (x < 40).all(1))
    np.testing.assert_array_equal(z[7], x[:, lane ^ 1])
    np.testing.assert_array_equal(z[8], np.broadcast_to(x.sum(1)[:, None], (2, 32)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 100])
def test_second_launch_sums_what_the_blocks_of_the_first_left(blocks: int, order: str) -> None:
    x = np.arange(500, dtype=np.float32)
    launches = [Launch("parts", 64, 0, 8, True), Launch("parts", 64, 0, 0), Launch("total", 1)]
    with emulator.settings(blocks=blocks, order=order):
        z, scratch = emulator.call(
            TWO_LAUNCHES, launches, [x], [((1,), np.float32), ((8,), np.float32)], [len(x)], zeroed=[1]
        )
    assert z[0] == x.sum()
    assert np.count_nonzero(scratch) == min(blocks, 8)


def test_results_are_poisoned_and_zeroed_as_asked() -> None:
    source = kernel("  ((float*)args.buffers[0])[threadIdx.x] = 1.0f;", buffers=2)
    written, zeroed = emulator.call(source, [Launch("k", 3)], [], [((5,), np.float32), ((4,), np.float64)], zeroed=[1])
    np.testing.assert_array_equal(written, [1, 1, 1, np.nan, np.nan])
    np.testing.assert_array_equal(zeroed, np.zeros(4))


def test_shared_memory_is_poisoned_for_each_block() -> None:
    source = kernel(
        """  __shared__ float fixed[4];
  float* z = (float*)args.buffers[0] + 4 * blockIdx.x;
  z[threadIdx.x] = fixed[threadIdx.x] + 1.0f;
  z[threadIdx.x + 2] = ((float*)shared_memory)[threadIdx.x];
  fixed[threadIdx.x] = 0.0f;
  ((float*)shared_memory)[threadIdx.x] = 0.0f;""",
        buffers=1,
    )
    (z,) = emulator.call(source, [Launch("k", 2, 8, 3)], [], [((3, 4), np.float32)])
    assert np.isnan(z).all()


def test_vector_types_and_arithmetic() -> None:
    source = kernel(
        """  const float4 a = __ldg((const float4*)args.buffers[0]);
  const double2 b = *(const double2*)args.buffers[1];
  __stcs((float4*)args.buffers[2], make_float4(a.w, a.z, fma(a.x, a.y, a.z), max(a.x, min(a.y, 0.5f))));
  *(double2*)args.buffers[3] = make_double2(fma(b.x, b.x, -b.y), b.y);
  const int2 c = make_int2(min(3, 4), max(threadIdx.x, 7u));
  *(int2*)args.buffers[4] = c;
  *(float2*)args.buffers[5] = make_float2(min(nanf(""), 2.0f), 1e-42f * 0.5f);""",
        buffers=6,
    )
    b = np.array([1.0 + 2.0**-30, 1.0 + 2.0**-29])
    results = [((4,), np.float32), ((2,), np.float64), ((2,), np.int32), ((2,), np.float32)]
    p, q, r, s = emulator.call(source, [Launch("k", 1)], [np.arange(1, 5, dtype=np.float32), b], results)
    np.testing.assert_array_equal(p, [4, 3, 5, 1])
    np.testing.assert_array_equal(q, [2.0**-60, b[1]])  # One rounding only.
    np.testing.assert_array_equal(r, [3, 7])
    assert s[0] == 2 and s[1] > 0  # Subnormal numbers are kept, whatever XLA's threads do.


def test_atomics_return_what_was_there() -> None:
    source = kernel(
        """  ((int*)args.buffers[1])[threadIdx.x] = atomicAdd((int*)args.buffers[0], 2);
  atomicAdd((double*)args.buffers[2], 0.5);
  atomicAdd((float*)args.buffers[3], 0.25f);""",
        buffers=4,
    )
    results = [((1,), np.int32), ((64,), np.int32), ((1,), np.float64), ((1,), np.float32)]
    with emulator.settings(order="shuffled"):
        total, before, double, single = emulator.call(source, [Launch("k", 64)], [], results, zeroed=[0, 2, 3])
    assert (total[0], double[0], single[0]) == (128, 32.0, 16.0)
    np.testing.assert_array_equal(np.sort(before), np.arange(0, 128, 2))
    assert (np.diff(before) < 0).any()  # The order of threads is not that of their numbers.


def test_compile_errors_count_lines_in_the_kernel_text() -> None:
    with pytest.raises(emulator.BuildError, match=r"kernel.cu:4:.*undeclared_name"):
        emulator.build(kernel("  undeclared_name = 1;", buffers=1))
    with pytest.raises(emulator.BuildError, match="no entry point"):
        emulator.build("__device__ int f() { return 1; }")


def test_a_kernel_is_built_once() -> None:
    source = kernel("  (void)args;", buffers=1)
    path = emulator.build(source)
    written = path.stat().st_mtime_ns
    assert emulator.build(source) == path and path.stat().st_mtime_ns == written
    assert emulator.build(source + "\n") != path
    assert emulator.kernel_names(TWO_LAUNCHES) == ["parts", "total"]


def test_dynamic_shared_memory_in_any_scope() -> None:
    source = """struct Args { void* buffers[1]; };
namespace inner { extern __shared__ float numbers[]; __device__ float* first() { return numbers; } }
template <class T> __device__ T* second() { extern __shared__ __align__(16) unsigned char bytes[]; return (T*)bytes; }
extern "C" __global__ void k(const Args args) {
  inner::first()[threadIdx.x] = threadIdx.x;
  __syncwarp();
  ((float*)args.buffers[0])[threadIdx.x] = second<float>()[31 - threadIdx.x];
}
"""
    (z,) = emulator.call(source, [Launch("k", 32, 128)], [], [((32,), np.float32)])
    np.testing.assert_array_equal(z, np.arange(32)[::-1])


def test_launches_that_cannot_be() -> None:
    source = kernel("", buffers=1, bounds="__launch_bounds__(64, 1)")
    results = [((1,), np.float32)]
    assert "threads must be 1 to 64, got 65" in fault_of(source, [Launch("k", 65)], [], results)
    assert "must be 0 to 232448, got 232449" in fault_of(source, [Launch("k", 1, 232449)], [], results)
    assert "has no kernel 'q'" in fault_of(source, [Launch("q", 1)], [], results)
    assert "struct Args must have the bytes of all buffers and sizes, 16, got 8" in fault_of(
        source, [Launch("k", 1)], [np.zeros(1)], results
    )
    assert "no image loads: " in fault_of([b"/nowhere/kernel.so"], [Launch("k", 1)], [], results)
    assert "zeroed names result 1 of 1" in fault_of(source, [Launch("k", 1)], [], results, zeroed=[1])


def test_the_first_image_that_has_every_kernel_is_taken() -> None:
    first = emulator.image(kernel("  *(int*)args.buffers[0] = 1;", buffers=1, name="other"))
    second = emulator.image(kernel("  *(int*)args.buffers[0] = 2;", buffers=1))
    (z,) = emulator.call([first, second], [Launch("k", 1)], [], [((), np.int32)])
    assert int(z) == 2


def test_empty_buffers_are_there_but_hold_nothing() -> None:
    source = kernel("  *(float*)args.buffers[1] = args.buffers[0] != nullptr ? 1.0f : 2.0f;", buffers=3)
    launches = [Launch("k", 1)]
    z, empty = emulator.call(source, launches, [np.zeros((0, 4))], [((1,), np.float32), ((0,), np.float32)])
    assert z[0] == 1 and empty.shape == (0,)
    reads = source.replace("args.buffers[0] != nullptr", "*(double*)args.buffers[0] > 0")
    assert "past the end of buffer 0 (0 bytes)" in fault_of(
        reads, launches, [np.zeros((0, 4))], [((1,), np.float32), ((0,), np.float32)]
    )


def test_settings_nest_and_return() -> None:
    source = kernel("  *(int*)args.buffers[0] = gridDim.x;", buffers=1)

    def resident() -> int:
        return int(emulator.call(source, [Launch("k", 1, 0, 50, True)], [], [((), np.int32)])[0])

    assert resident() == 3
    with emulator.settings(blocks=7):
        with emulator.settings(order="reverse"):
            assert resident() == 7
        with contextlib.suppress(ZeroDivisionError), emulator.settings(blocks=2):
            assert resident() == 2
            raise ZeroDivisionError
        assert resident() == 7
    assert resident() == 3
    with pytest.raises(ValueError, match="order must be one of forward, reverse, shuffled, got 'random'"):
        with emulator.settings(order="random"):
            pass


def test_many_calls_of_one_program() -> None:
    emulator.register()
    given = handler.attributes([Launch("k", 256, 2048)], [emulator.image(BLOCK_SUM)], [256])

    @jax.jit
    def sums(x: jax.Array) -> list[jax.Array]:
        one = jax.ffi.ffi_call("jaxcg_launch", jax.ShapeDtypeStruct((1,), np.float64), vmap_method="sequential")
        return [one(x * factor, **given) for factor in range(6)]

    with handler.double_precision():
        x = np.arange(256.0)
        for _ in range(3):
            np.testing.assert_array_equal(np.ravel(sums(x)), x.sum() * np.arange(6))


def test_the_library_takes_its_kernels_inside_emulated_only() -> None:
    product = jaxcg.TensorProduct.channelwise("5x0e+5x1o", "0e+1o", "0e+1o")
    x, y, w = (
        np.random.default_rng(size).normal(size=(7, size)).astype(np.float32)
        for size in (product.irreps_in1.dim, product.irreps_in2.dim, product.weight_numel)
    )
    texts: list[str] = []

    def compile_source(text: str) -> bytes:
        texts.append(text)
        return emulator.image(text)

    @jax.jit
    def squares(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        return jax.numpy.sum(product(x, y, w) ** 2)

    def has_call() -> bool:
        return "jaxcg_launch" in squares.lower(x, y, w).as_text()

    expected = squares(x, y, w)
    assert not has_call()
    with emulator.emulated(compile_source):
        assert has_call() and len(texts) == 1
        np.testing.assert_allclose(squares(x, y, w), expected, rtol=1e-5)
        with pytest.raises(jax.errors.JaxRuntimeError, match="no kernel"):
            with emulator.emulated(lambda text: emulator.image(text.replace("jaxcg_0", "renamed"))):
                squares(x, y, w)
        assert has_call()
    assert not has_call()
    np.testing.assert_array_equal(squares(x, y, w), expected)


def test_the_portable_context_switch() -> None:
    """Machines other than x86-64 use the C library's contexts."""
    text = compiler.host_text(SHUFFLES)
    flags = [*compiler.KERNEL_FLAGS, f"-I{compiler.SOURCES}", "-c"]
    objects = [compiler.compile_once(".o", flags, [], (), text), *compiler.support("JAXCG_UCONTEXT")]
    image = str(compiler.compile_once(".so", ["-shared"], objects)).encode()
    assert hasattr(ctypes.CDLL(image.decode()), "jaxcg_host_launch")
    x = np.arange(64, dtype=np.int32)
    (z,) = emulator.call([image], [Launch("k", 64)], [x], [((9, 64), np.int32)])
    np.testing.assert_array_equal(z[0], x ^ 5)
