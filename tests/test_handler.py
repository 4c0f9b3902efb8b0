"""The CUDA handler's own code over a driver that records its calls, which needs no GPU."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.ffi
import numpy as np
import pytest

from jaxcg.runtime.ffi import Launch, call_attributes
from tests import mock_driver


@pytest.fixture
def driver() -> mock_driver.MockDriver:
    mock = mock_driver.load()
    mock.reset()
    return mock


def run_call(x: Any, run: list[Launch], *, image: bytes = b"sm:f,g,add_bytes", **changes: Any) -> Any:
    images, zeroed = changes.pop("images", [image]), changes.pop("zeroed", [])
    sizes = changes.pop("sizes", [x.size * x.dtype.itemsize])
    attributes = {**call_attributes(images, "text", run, sizes, zeroed, "a product"), **changes}

    def call(x: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call(mock_driver.TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, **attributes)

    return jax.block_until_ready(jax.jit(call)(x))


def test_kernel_gets_operands_results_and_sizes(driver: mock_driver.MockDriver) -> None:
    x = np.arange(7, dtype=np.uint8)
    for _ in range(4):
        z = run_call(x, [Launch("add_bytes", 64, 0, 3, False)], zeroed=[0])
        np.testing.assert_array_equal(z, x)
    launch = "cuLaunchKernelEx add_bytes grid 3x1x1 threads 64 shared 0 stream 7"
    assert driver.take_log()[-2:] == ["cuMemsetD8Async 7 stream 7", launch]


def test_launches_run_in_order_and_the_empty_ones_are_left_out(driver: mock_driver.MockDriver) -> None:
    launches = [Launch(name, 32, 0, blocks, False) for name, blocks in (("g", 1), ("f", 0), ("add_bytes", 2))]
    run_call(np.zeros(3, np.uint8), [*launches, Launch("f", 96, 0, 5, False)], zeroed=[0])
    kernels = [line.split()[1] for line in driver.take_log() if line.startswith("cuLaunchKernel")]
    assert kernels == ["g", "add_bytes", "f"]


def test_persistent_grid_is_one_block_a_multiprocessor(driver: mock_driver.MockDriver) -> None:
    launches = [Launch("f", 32, 0, 1000, True), Launch("g", 32, 0, 7, True), Launch("f", 32, 0, 1000, False)]
    run_call(np.zeros(3, np.uint8), launches)
    grids = [line.split()[3] for line in driver.take_log() if line.startswith("cuLaunchKernel")]
    assert grids == ["10x1x1", "7x1x1", "1000x1x1"]


@pytest.mark.parametrize("major, capturing", [(8, 0), (9, 0), (9, 1)])
def test_launches_start_early_where_the_device_can(driver: mock_driver.MockDriver, major: int, capturing: int) -> None:
    # Never the first that runs: what is ahead of it belongs to others. Nor inside a CUDA graph.
    driver.set("major", major)
    driver.set("capturing", capturing)
    driver.set("device", 10 * major + capturing)
    launches = [Launch("f", 32, 0, 0, False), *(Launch(name, 32, 0, 3, False, True) for name in ("g", "f", "g"))]
    run_call(np.zeros(3, np.uint8), launches, image=b"sm:f,g,early")
    early = ["attribute 6" in line for line in driver.take_log() if line.startswith("cuLaunchKernel")]
    assert early == [False, major == 9 and not capturing, major == 9 and not capturing]


def test_each_device_is_prepared_once(driver: mock_driver.MockDriver) -> None:
    launches = [Launch("f", 32, 200_000, 4, True)]
    for device in (3, 4, 3, 4):
        driver.set("device", device)
        run_call(np.zeros(3, np.uint8), launches, image=b"sm:f,prepared_once")
    log = driver.take_log()
    assert log.count("cuKernelSetAttribute f 200000 device 3") == 1
    assert log.count("cuOccupancy f 32 200000") == 2
    assert sum(line.startswith("cuLaunchKernel") for line in log) == 4
    assert sum(line.startswith("cuLibraryLoadData") for line in log) == 1


def test_zero_sized_arrays_and_no_blocks_launch_nothing(driver: mock_driver.MockDriver) -> None:
    z = run_call(np.zeros((0, 4), np.float32), [Launch("f", 32, 0, 0, True)], zeroed=[0])
    assert z.shape == (0, 4)
    assert not [line for line in driver.take_log() if line.startswith(("cuLaunch", "cuMemset"))]


def test_first_image_that_fits_is_used(driver: mock_driver.MockDriver) -> None:
    images = [b"other architecture", b"sm:lacks_the_kernel", b"sm:f,third", b"sm:f,fourth"]
    run_call(np.zeros(3, np.uint8), [Launch("f", 32, 0, 1, False)], images=images)
    loaded = [line.partition(" ")[2] for line in driver.take_log() if line.startswith("cuLibraryLoadData")]
    assert loaded == [image.decode() for image in images[:3]]


def test_no_image_that_fits_lists_every_reason(driver: mock_driver.MockDriver) -> None:
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT.*\(a product\).*image 1 of 2.*209|NO_BINARY") as caught:
        run_call(np.zeros(3, np.uint8), [Launch("f", 32, 0, 1, False)], images=[b"another", b"sm:other_kernel"])
    assert "image 2 of 2: kernel f" in str(caught.value)


def test_wrong_attribute_type_is_named(driver: mock_driver.MockDriver) -> None:
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT.*attribute `launches` must be an int64 array"):
        run_call(np.zeros(3, np.uint8), [Launch("f", 32, 0, 1, False)], launches=np.array([32, 0, 1, 0, 0], np.int32))


def test_wrong_values_are_named(driver: mock_driver.MockDriver) -> None:
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT: jaxcg_launch \(a product\): launch 0: threads must be"):
        run_call(np.zeros(3, np.uint8), [Launch("f", 32, 0, 1, False)], launches=np.array([0, 0, 1, 0, 0], np.int64))


def test_one_digest_never_stands_for_two_programs(driver: mock_driver.MockDriver) -> None:
    launches = [Launch("f", 32, 0, 1, False)]
    run_call(np.zeros(3, np.uint8), launches, image=b"sm:f", digest="0" * 64)
    with pytest.raises(Exception, match="already stands for another program"):
        run_call(np.zeros(3, np.uint8), launches, image=b"sm:f,g", digest="0" * 64)


def test_arguments_must_fill_the_kernels_struct(driver: mock_driver.MockDriver) -> None:
    driver.set("argument_bytes", 32)
    with pytest.raises(Exception, match="takes 32 bytes of arguments, this call has 1 operands, 1 results and 1"):
        run_call(np.zeros(3, np.uint8), [Launch("f", 32, 0, 1, False)], image=b"sm:f,struct")


def test_zeroed_must_name_a_result(driver: mock_driver.MockDriver) -> None:
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT.*zeroed names result 1 of 1"):
        run_call(np.zeros(3, np.uint8), [Launch("f", 32, 0, 1, False)], zeroed=[1])


def test_block_too_large_for_the_device_lists_its_resources(driver: mock_driver.MockDriver) -> None:
    driver.set("occupancy", 0)
    with pytest.raises(Exception, match=r"\(a product\).*kernel f \(640 threads of 77 registers, 99000 dynamic"):
        run_call(np.zeros(3, np.uint8), [Launch("f", 640, 99000, 1, True)])


@pytest.mark.parametrize("function", ["cuLaunchKernelEx", "cuMemsetD8Async", "cuKernelSetAttribute"])
def test_failing_driver_is_named(function: str, driver: mock_driver.MockDriver) -> None:
    driver.fail(function)
    with pytest.raises(Exception, match=rf"INTERNAL: jaxcg_launch \(a product\).*{function} failed: CUDA_ERROR"):
        run_call(
            np.zeros(3, np.uint8),
            [Launch("f", 32, 150_000, 1, False)],
            image=b"sm:f," + function.encode(),
            zeroed=[0],
        )


def test_threads_share_one_program(driver: mock_driver.MockDriver) -> None:
    def work(count: int) -> bool:
        x = np.arange(count, dtype=np.uint8)
        launches = [Launch("add_bytes", 64, 0, 3, True)]
        return all(
            np.array_equal(run_call(x, launches, image=b"sm:add_bytes,many_threads", zeroed=[0]), x) for _ in range(10)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(1, 9)))
    log = driver.take_log()
    # Threads may load it at the same time; all copies but one are given back, and one preparation is kept.
    loads = sum(line.startswith("cuLibraryLoadData") for line in log)
    assert loads - sum(line.startswith("cuLibraryUnload") for line in log) == 1
    assert sum(line.startswith("cuOccupancy") for line in log) == 1
    assert sum(line.startswith("cuLaunchKernel") for line in log) == 80
