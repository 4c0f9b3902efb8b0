"""The CUDA handler over a driver that records its calls, as a CPU custom call."""

import ctypes
from functools import lru_cache
from pathlib import Path

import jax
import jax.ffi

from tests.emulator.compiler import compile_once

TARGET = "jaxcg_launch_on_mock"
_SOURCES = Path(__file__).parent
_HANDLER = _SOURCES.parents[1] / "cuda_ffi"


class MockDriver:
    """Settings and record of the fake driver; every value is per process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.mock_take_log.restype = ctypes.c_char_p

    def reset(self) -> None:
        """A device of compute capability 9 with 10 multiprocessors, which does not tell the size of arguments."""
        values = {"occupancy": 2, "multiprocessors": 10, "major": 9, "capturing": 0, "device": 0, "argument_bytes": 0}
        for name, value in values.items():
            self.set(name, value)
        self.fail("")
        self.take_log()

    def set(self, name: str, value: int) -> None:
        """Changes what the driver answers."""
        self._library.mock_set(name.encode(), value)

    def fail(self, function: str) -> None:
        """Makes one function of the driver fail from now on."""
        self._library.mock_fail(function.encode())

    def take_log(self) -> list[str]:
        """The driver's calls since the last time."""
        return self._library.mock_take_log().decode().splitlines()


@lru_cache(maxsize=1)
def load() -> MockDriver:
    """Builds the handler over the fake driver and registers it for the CPU; once per process."""
    include = Path(jax.ffi.include_dir())
    sources = [_SOURCES / "mock.cc", _HANDLER / "launch.cc", _HANDLER / "call.cc"]
    headers = [*sorted(_HANDLER.glob("*.h")), *sorted((include / "xla/ffi/api").glob("*.h"))]
    flags = ["-std=c++17", "-O1", "-Wall", "-fPIC", "-shared", f"-I{_HANDLER}", f"-isystem{include}"]
    library = ctypes.CDLL(str(compile_once(".so", flags, sources, headers)))
    jax.devices("cpu")  # The backend first: the handler is registered with it.
    stages = {stage: jax.ffi.pycapsule(getattr(library, f"mock_{stage}")) for stage in ("instantiate", "execute")}
    jax.ffi.register_ffi_target(TARGET, stages, platform="cpu")
    return MockDriver(library)
