"""Compiled images on disk, shared by all processes of a user, without locks.

A file's name is the SHA-256 of everything that decides its content. It is written beside its place and moved there in
one step, so a reader sees all of it or nothing; a checksum tells a damaged file, which is set aside and built again.
"""

import functools
import hashlib
import json
import os
import tempfile
import warnings
from pathlib import Path

from jaxcg.runtime import nvrtc

_MAGIC = b"jaxcg-image-1"


def cache_directory() -> Path:
    """Where compiled images are kept: the environment variable JAXCG_CACHE_DIR, or ~/.cache/jaxcg."""
    return Path(os.environ.get("JAXCG_CACHE_DIR") or Path.home() / ".cache" / "jaxcg")


def dump_directory() -> Path | None:
    """Where to write each kernel's text for reading: the environment variable JAXCG_DUMP_DIR, or nowhere."""
    directory = os.environ.get("JAXCG_DUMP_DIR")
    return Path(directory) if directory else None


def key_of(source: str, target: str, options: tuple[str, ...], compiler: tuple[int, int]) -> str:
    """SHA-256, in hexadecimal, of all that decides what an image holds.

    Args:
        source: the CUDA text.
        target: the NVRTC target, such as ``"sm_90"``.
        options: further compiler options.
        compiler: version of NVRTC.

    >>> key_of("a", "sm_90", (), (13, 0)) == key_of("a", "sm_80", (), (13, 0))
    False
    """
    # JSON keeps the fields apart: no two different tuples have one text.
    fields = json.dumps([_MAGIC.decode(), source, target, list(options), list(compiler)])
    return hashlib.sha256(fields.encode()).hexdigest()


def compile_cached(
    source: str, target: str, options: tuple[str, ...] = (), *, label: str = "kernel"
) -> nvrtc.CompiledImage:
    """The image of a CUDA text: from this process, from disk, or else compiled.

    Args:
        source: the CUDA text.
        target: ``sm_XY`` or ``compute_XY``.
        options: further compiler options.
        label: the dumped file's name begins with it; it has no effect on the image.

    Raises:
        CompileError: the compiler refused the text.
        MissingLibraryError: no CUDA run-time compiler is installed.
    """
    directory = dump_directory()
    if directory is not None:
        # Before compiling: a text that does not compile is the one to read.
        _dump_text(directory, label, source)
    image = _compile(source, target, options, cache_directory())
    if directory is not None:
        _dump_image(directory, label, source, image)
    return image


@functools.lru_cache(maxsize=512)
def _compile(source: str, target: str, options: tuple[str, ...], directory: Path) -> nvrtc.CompiledImage:
    key = key_of(source, target, options, nvrtc.version())
    path = directory / key[:2] / f"{key}.image"
    image = _read(path, target)
    if image is None:
        image = nvrtc.compile_source(source, target, options)
        _write(path, image)
    return image


def _read(path: Path, target: str) -> nvrtc.CompiledImage | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    magic, _, rest = content.partition(b"\n")
    checksum, _, payload = rest.partition(b"\n")
    if magic != _MAGIC or checksum != _checksum(payload):
        # Kept for whoever wants to know how it happened; one per key.
        try:
            os.replace(path, path.with_suffix(".corrupt"))
        except OSError:
            return None  # Another process was faster, or nothing can be written here.
        warnings.warn(f"set aside a damaged file of the kernel cache: {path}", RuntimeWarning, stacklevel=2)
        return None
    log, _, image = payload.partition(b"\n")
    return nvrtc.image_of(target, image, json.loads(log))


def _write(path: Path, image: nvrtc.CompiledImage) -> None:
    payload = json.dumps(image.log).encode() + b"\n" + image.image
    content = b"\n".join((_MAGIC, _checksum(payload), payload))
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".writing-", delete=False) as file:
            temporary = Path(file.name)
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        warnings.warn(
            f"the kernel cache cannot be written ({error}): kernels are compiled anew in every process; "
            "set JAXCG_CACHE_DIR to a folder that can be written",
            RuntimeWarning,
            stacklevel=2,
        )


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest().encode()


def _dump_text(directory: Path, label: str, source: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{_stem(label, source)}.cu").write_text(source)


def _dump_image(directory: Path, label: str, source: str, image: nvrtc.CompiledImage) -> None:
    stem = f"{_stem(label, source)}.{image.target}"
    suffix = "ptx" if image.target.startswith("compute_") else "cubin"
    (directory / f"{stem}.{suffix}").write_bytes(image.image)
    (directory / f"{stem}.log").write_text(image.log + "\n")


def _stem(label: str, source: str) -> str:
    return f"{label}-{hashlib.sha256(source.encode()).hexdigest()[:12]}"
