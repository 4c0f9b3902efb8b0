"""Kernel text to programs for the CPU: shared objects for the handler, executables with a sanitizer."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

Sanitizer = Literal["address", "thread"]

SOURCES = Path(__file__).parent

_COMPILER = "g++"  # clang++ has another table of flags and no -fno-gnu-unique.

_ENTRY = re.compile(
    r'extern\s+"C"\s+__global__\s+(?:__launch_bounds__\s*\((?P<before>[^)]*)\)\s*)?'
    r"void\s+(?:__launch_bounds__\s*\((?P<after>[^)]*)\)\s*)?(?P<name>\w+)\s*\("
)
_DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+(?P<type>[^;=]*?)(?P<name>\w+)\s*\[\s*\]\s*;")

# -fno-strict-aliasing: CUDA text reads floats as float4. alignment, bounds: see faults.cc.
KERNEL_FLAGS = (
    *("-std=c++17", "-O1", "-w", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique"),
    *("-fno-strict-aliasing", "-fno-math-errno", "-fsanitize=alignment,bounds"),
)
_SUPPORT_FLAGS = ("-std=c++17", "-O2", "-w", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique")


class BuildError(RuntimeError):
    """The compiler rejected the text; the message is the compiler's, lines counted in the kernel text."""


@lru_cache(maxsize=1)
def _multiply_add_flags() -> tuple[str, ...]:
    # A GPU contracts a * b + c to one rounding. Without this, fma() is also a slow call.
    if platform.machine() != "x86_64":
        return ()
    try:
        return ("-mfma",) if re.search(r"\bfma\b", Path("/proc/cpuinfo").read_text()) else ()
    except OSError:
        return ()


@lru_cache(maxsize=1)
def cache_directory() -> Path:
    """Where built files are kept between runs, for this user alone."""
    directory = Path(tempfile.gettempdir()) / f"jaxcg-emulator-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise RuntimeError(f"{directory} belongs to another user; set TMPDIR to a directory of your own")
    return directory


@lru_cache(maxsize=1)
def _compiler_version() -> str:
    return subprocess.run([_COMPILER, "--version"], check=True, capture_output=True, text=True).stdout


def compile_once(
    suffix: str, flags: Sequence[str], sources: Sequence[Path], headers: Sequence[Path] = (), text: str = ""
) -> Path:
    """Compile and link, unless the same was done before.

    Args:
        suffix: of the product, such as ``".so"``.
        flags: the compiler's, which say what to make.
        sources: files to compile or link.
        headers: files that the sources include and that may change.
        text: C++ to compile beside `sources`.

    Returns:
        The product's path. Its name is the SHA-256 of all that went in.

    Raises:
        BuildError: the compiler failed.
    """
    digest = hashlib.sha256()
    for part in (_compiler_version(), *flags, text):
        digest.update(part.encode() + b"\0")
    for path in (*sources, *headers):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    product = cache_directory() / f"{digest.hexdigest()}{suffix}"
    if product.exists():
        return product
    with tempfile.TemporaryDirectory(dir=cache_directory()) as scratch:
        made, inputs = Path(scratch) / "made", [str(path) for path in sources]
        if text:
            (Path(scratch) / "kernel.cc").write_text(text)
            inputs.insert(0, str(Path(scratch) / "kernel.cc"))
        command = [_COMPILER, *flags, *inputs, "-o", str(made)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            raise BuildError(f"{_COMPILER} failed:\n{run.stderr[:8000]}")
        os.replace(made, product)  # Another process may be doing the same.
    return product


def kernel_names(source: str) -> list[str]:
    """The entry points of kernel text, in order."""
    return [match["name"] for match in _ENTRY.finditer(source)]


def host_text(source: str) -> str:
    """Kernel text as g++ is given it: the CUDA vocabulary before it, the table of entry points behind it."""
    entries = list(_ENTRY.finditer(source))
    if not entries:
        raise BuildError(
            'the kernel text has no entry point: expected `extern "C" __global__ void NAME(const Args args)`'
        )
    bound = _DYNAMIC_SHARED.sub(r'extern \g<type>\g<name>[] __asm__("jaxcg_dynamic_shared");', source)
    table = []
    for entry in entries:
        bounds = entry["before"] or entry["after"] or "0"
        table.append(f'  host::entry<{entry["name"]}>("{entry["name"]}", {bounds.split(",")[0]}),')
    return "\n".join(
        [
            '#include "cuda_on_host.h"',
            '#line 1 "kernel.cu"',
            bound,
            "namespace host {",
            "template <class Args> void call_with(void (*kernel)(Args), const void* arguments) {",
            "  kernel(*static_cast<const Args*>(arguments));",
            "}",
            "template <class Args> constexpr long long size_of(void (*)(Args)) { return sizeof(Args); }",
            "template <auto kernel> Kernel entry(const char* name, long long max_threads) {",
            "  auto call = [](const void* arguments) { call_with(kernel, arguments); };",
            "  return {name, call, size_of(kernel), max_threads};",
            "}",
            f"const int num_kernels = {len(entries)};",
            f"const Kernel kernels[{len(entries)}] = {{",
            *table,
            "};",
            "}",
            "",
        ]
    )


def _symbol_flags(source: str) -> list[str]:
    # g++ forgets the assembler's name of a declaration inside a function template; the linker then sees this one.
    names = sorted({match["name"] for match in _DYNAMIC_SHARED.finditer(source)})
    return [f"-Wl,--defsym={name}=jaxcg_dynamic_shared" for name in names]


def support(define: str | None) -> list[Path]:
    """The scheduler as objects: the same for every kernel text, so compiled once."""
    headers = [SOURCES / name for name in ("scheduler.h", "context.h", "faults.h", "names.h")]
    flags = [*_SUPPORT_FLAGS, *([f"-D{define}"] if define else []), f"-I{SOURCES}", "-c"]
    return [compile_once(".o", flags, [SOURCES / name], headers) for name in ("scheduler.cc", "faults.cc")]


@lru_cache(maxsize=16)
def _precompiled(flags: tuple[str, ...], headers: tuple[Path, ...]) -> Path:
    """A folder in which g++ finds the compiled form of the first header. (Saves a quarter of a small text's time.)"""
    compiled = compile_once(".gch", [*flags, f"-I{SOURCES}", "-x", "c++-header"], headers[:1], headers[1:])
    folder = compiled.with_suffix(".headers")
    folder.mkdir(exist_ok=True)
    place = folder / f"{headers[0].name}.gch"
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=cache_directory()) as scratch:
            os.replace(shutil.copyfile(compiled, Path(scratch) / "made"), place)
    return folder


def build(source: str, *, sanitize: Sanitizer | None = None, optimize: int = 0) -> Path:
    """Compile kernel text for the CPU.

    Args:
        source: the kernel text, as given to NVRTC.
        sanitize: None for a shared object that the handler loads; ``"address"`` or ``"thread"`` for an executable
            with AddressSanitizer or ThreadSanitizer (a Python process cannot load such a library).
        optimize: the compiler's level. Most texts run once, and with 0 g++ takes half the time, with AddressSanitizer
            a quarter; a sanitizer then also sees what an optimiser would remove.

    Returns:
        Path of the shared object or the executable, kept between runs.

    Raises:
        BuildError: no entry point, or the compiler rejected the text.
    """
    define, sanitizer = {
        None: (None, ()),
        "address": ("JAXCG_ASAN", ("-fsanitize=address", "-g", "-fno-omit-frame-pointer")),
        "thread": ("JAXCG_TSAN", ("-fsanitize=thread", "-g", "-fno-omit-frame-pointer")),
    }[sanitize]
    headers = [SOURCES / "cuda_on_host.h", SOURCES / "scheduler.h"]
    flags = [*KERNEL_FLAGS, f"-O{optimize}", *_multiply_add_flags(), *sanitizer]
    folder = _precompiled(tuple(flags), tuple(headers))
    flags += [f"-I{folder}", f"-I{SOURCES}", "-c"]
    objects = [compile_once(".o", flags, [], headers, host_text(source)), *support(define)]
    # Linked without -fsanitize=alignment,bounds: faults.cc has what its library would bring.
    flags = [*sanitizer[:1], *_symbol_flags(source)]
    if sanitize is None:
        return compile_once(".so", ["-shared", *flags], objects)
    main = compile_once(".o", [*_SUPPORT_FLAGS, "-c"], [SOURCES / "standalone.cc"], headers)
    return compile_once("", flags, [*objects, main])


def image(source: str, *, optimize: int = 0) -> bytes:
    """Kernel text to what the attribute `images` holds for the CPU handler: the path of the shared object."""
    return os.fsencode(build(source, optimize=optimize))


def sanitized_image(sanitize: Sanitizer) -> Callable[[str], bytes]:
    """Kernel text to a program with a sanitizer. The handler runs it for each call; a finding is the call's error."""
    return lambda source: os.fsencode(build(source, sanitize=sanitize))
