"""CUDA text to machine code: NVIDIA's run-time compiler through ctypes, found at the first use."""

import ctypes
import ctypes.util
import functools
import importlib.util
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxcg._errors import MissingLibraryError, UnsupportedError

# One cubin per architecture family that a program exported on a machine without a GPU carries.
EXPORT_TARGETS = ("sm_80", "sm_90", "sm_100")
SOURCE_NAME = "kernel.cu"
_BASE_OPTIONS = ("--std=c++17",)


class CompileError(RuntimeError):
    """The compiler refused a generated text: a fault of jaxcg, not of its caller.

    The message holds the compiler's log and the lines it points to; ``log`` and ``source`` hold both in full.
    """

    def __init__(self, message: str, *, log: str, source: str) -> None:
        super().__init__(message)
        self.log = log
        self.source = source


@dataclass(frozen=True)
class KernelReport:
    """What the assembler says about one kernel; all sizes in bytes, stack and spills per thread.

    ``code_bytes`` is the size of the kernel's machine code, which must fit the instruction cache to run at speed.
    """

    name: str
    registers: int
    stack_frame: int
    spill_stores: int
    spill_loads: int
    static_shared: int
    code_bytes: int


@dataclass(frozen=True)
class CompiledImage:
    """Machine code (a cubin) or PTX of one text, for one target.

    ``reports`` has one entry per kernel, by name; it is empty for PTX, which the driver assembles later.
    """

    target: str
    image: bytes
    log: str
    reports: tuple[KernelReport, ...]

    def __repr__(self) -> str:
        return f"CompiledImage(target={self.target!r}, {len(self.image)} bytes, reports={self.reports!r})"


def targets(capabilities: Sequence[str]) -> tuple[str, ...]:
    """What to compile for, given the compute capabilities of the devices of a computation.

    Args:
        capabilities: ``device.compute_capability`` of each device, such as ``"9.0"``; empty without a GPU.

    Returns:
        NVRTC targets, to be compiled in this order: ``sm_XY`` for each kind of device that the compiler knows;
        PTX of its highest architecture (``compute_XY``) for a device newer than the compiler; `EXPORT_TARGETS` if
        there are no devices.

    Raises:
        UnsupportedError: a device is older than every architecture of the compiler.

    >>> targets([])
    ('sm_80', 'sm_90', 'sm_100')
    >>> targets(["9.0", "9.0"])
    ('sm_90',)
    """
    if not capabilities:
        return EXPORT_TARGETS
    return tuple(dict.fromkeys(target_of(capability, supported_architectures()) for capability in capabilities))


def target_of(capability: str, supported: Sequence[int]) -> str:
    """The target for one device.

    Args:
        capability: compute capability, such as ``"9.0"``.
        supported: the compiler's architectures, such as ``(80, 90, 100)``.

    >>> target_of("9.0", (80, 90, 100)), target_of("99.9", (80, 90, 100))
    ('sm_90', 'compute_100')
    """
    major, _, minor = capability.partition(".")
    architecture = 10 * int(major) + int(minor or 0)
    if architecture in supported:
        return f"sm_{architecture}"
    older = [known for known in supported if known < architecture]
    if not older:
        raise UnsupportedError.of(
            "device",
            expected=f"a GPU of compute capability {min(supported) / 10} or higher",
            received=f"one of {capability}",
            fix="install an older CUDA compiler (the nvidia-cuda-nvrtc-cu12 package), or use impl='xla'",
        )
    return f"compute_{max(older)}"


def compile_source(source: str, target: str, options: tuple[str, ...] = ()) -> CompiledImage:
    """Compiles CUDA text, without any cache.

    Args:
        source: the text of one translation unit.
        target: ``sm_XY`` for a cubin or ``compute_XY`` for PTX.
        options: further compiler options. Fast mathematics is never on unless given here.

    Raises:
        CompileError: the compiler refused the text.
        MissingLibraryError: no CUDA run-time compiler is installed.
    """
    status, log, image = _load().compile(source, target, options)
    if status != 0:
        raise CompileError(_explain(source, target, log, version()), log=log, source=source)
    return image_of(target, image, log)


def image_of(target: str, image: bytes, log: str) -> CompiledImage:
    """A compiled image with the reports read from the compiler's log and the machine code."""
    return CompiledImage(target, image, log, () if target.startswith("compute_") else _read_reports(log, image))


def version() -> tuple[int, int]:
    """Version of the CUDA run-time compiler, part of the key of every compiled image."""
    return _load().version


def supported_architectures() -> tuple[int, ...]:
    """Architectures that the compiler makes machine code for, ascending, such as ``(80, 86, 90)``."""
    return _load().architectures


class _Nvrtc:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self._check(library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        architectures = (ctypes.c_int * count.value)()
        self._check(library.nvrtcGetSupportedArchs(architectures))
        self.version = (major.value, minor.value)
        self.architectures = tuple(sorted(architectures))

    def compile(self, source: str, target: str, options: tuple[str, ...]) -> tuple[int, str, bytes]:
        """Status (0: success), log and image."""
        library = self._library
        machine_code = target.startswith("sm_")
        # The assembler runs, and reports, only for machine code.
        report = ("--ptxas-options=-v",) if machine_code else ()
        flags = [flag.encode() for flag in (*_BASE_OPTIONS, f"--gpu-architecture={target}", *report, *options)]
        program = ctypes.c_void_p()
        self._check(
            library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), SOURCE_NAME.encode(), 0, None, None)
        )
        try:
            status = library.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
            lines = self._fetch("ProgramLog", program).rstrip(b"\0").decode(errors="replace").splitlines()
            # The time differs from run to run, and one text should give one image and one log.
            log = "\n".join(line for line in lines if "Compile time" not in line)
            if status != 0:
                return status, log or library.nvrtcGetErrorString(status).decode(), b""
            return 0, log, self._fetch("CUBIN" if machine_code else "PTX", program)
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _fetch(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"NVRTC call failed: {self._library.nvrtcGetErrorString(status).decode()} ({status})")


@functools.cache
def _load() -> _Nvrtc:
    tried: list[str] = []
    for candidate in _candidates():
        try:
            return _Nvrtc(ctypes.CDLL(candidate))
        except (OSError, AttributeError, RuntimeError) as error:
            tried.append(f"{candidate} ({error})")
    raise MissingLibraryError.of(
        "libnvrtc.so",
        expected="installed, to compile kernels for CUDA",
        received="no library that loads; tried " + ", ".join(tried),
        fix="pip install 'jaxcg[cuda13]' (or 'jaxcg[cuda12]'; nvidia-cuda-nvrtc alone on a machine without a GPU)",
    )


def _candidates() -> Iterator[str]:
    # A cubin of CUDA 13 does not load in a driver of CUDA 12: follow the CUDA that this jax runs on.
    plugins = [major for major in (13, 12) if importlib.util.find_spec(f"jax_cuda{major}_plugin")]
    majors = [*plugins, *(major for major in (13, 12) if major not in plugins)]
    packages = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (packages.submodule_search_locations or ())] if packages else []
    for major in majors:
        for root in roots:
            # nvidia/cu13/lib in the packages of CUDA 13, nvidia/cuda_nvrtc/lib in those of CUDA 12.
            yield from (str(path) for path in sorted(root.glob(f"*/lib/libnvrtc.so.{major}")))
    for major in majors:
        yield f"libnvrtc.so.{major}"
        yield from (str(path) for path in sorted(Path("/usr/local").glob(f"cuda*/lib64/libnvrtc.so.{major}")))
    if found := ctypes.util.find_library("nvrtc"):
        yield found


def _explain(source: str, target: str, log: str, compiler: tuple[int, int]) -> str:
    lines = source.splitlines()
    numbers = [int(number) for number in re.findall(rf"{re.escape(SOURCE_NAME)}\((\d+)\): [a-z ]*error", log)]
    shown = sorted({near for number in numbers[:3] for near in range(number - 2, number + 3) if 0 < near <= len(lines)})
    excerpt = "".join(f"\n{'>' if near in numbers else ' '}{near:6d} | {lines[near - 1]}" for near in shown)
    return f"NVRTC {compiler[0]}.{compiler[1]} cannot compile a generated kernel for {target}:\n{log}{excerpt}"


def _read_reports(log: str, image: bytes) -> tuple[KernelReport, ...]:
    sizes = dict(_text_sections(image))
    reports: list[KernelReport] = []
    for section in re.split(r"Compiling entry function '", log)[1:]:
        name = section[: section.index("'")]
        # Functions that were not inlined have properties too: take the kernel's own.
        own = section.partition(f"Function properties for {name}\n")[2]
        reports.append(
            KernelReport(
                name=name,
                registers=_number(r"Used (\d+) registers", own),
                stack_frame=_number(r"(\d+) bytes stack frame", own),
                spill_stores=_number(r"(\d+) bytes spill stores", own),
                spill_loads=_number(r"(\d+) bytes spill loads", own),
                static_shared=_number(r"(\d+) bytes smem", own),
                code_bytes=sizes.get(name, 0),
            )
        )
    return tuple(sorted(reports, key=lambda report: report.name))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def _text_sections(image: bytes) -> Iterator[tuple[str, int]]:
    """Name and size of each kernel's code in a cubin, which is a 64-bit ELF file."""
    if image[:5] != b"\x7fELF\x02":
        return
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
    # A section header: name, type, flags, address, offset, size.
    headers = [struct.unpack_from("<IIQQQQ", image, table + entry_size * index) for index in range(count)]
    names_offset = headers[names_index][4]
    for header in headers:
        start = names_offset + header[0]
        name = image[start : image.index(b"\0", start)].decode()
        if name.startswith(".text."):
            yield name.removeprefix(".text."), header[5]
