"""The way from CUDA text to a custom call: package, compiler, cache on disk, attributes."""

import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.ffi
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcg._errors import JaxcgError, MissingLibraryError, UnsupportedError
from jaxcg.runtime import cache, ffi, nvrtc
from jaxcg.runtime.ffi import Launch, call_attributes

ROOT = Path(__file__).parents[1]
REVERSE = """struct Args { void* buffers[2]; long long sizes[1]; };
extern "C" __global__ void __launch_bounds__(128) reverse(const Args args) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  float* row = reinterpret_cast<float*>(shared_memory);
  row[threadIdx.x] = static_cast<const float*>(args.buffers[0])[threadIdx.x];
  __syncthreads();
  static_cast<float*>(args.buffers[1])[threadIdx.x] = row[127 - threadIdx.x] * args.sizes[0];
}
"""
SPILLING = """struct Args { void* buffers[2]; long long sizes[1]; };
extern "C" __global__ void __launch_bounds__(1024) spill(const Args args) {
  __shared__ float fixed[28];
  const float* from = static_cast<const float*>(args.buffers[0]);
  float kept[100];
  #pragma unroll
  for (int i = 0; i < 100; ++i) kept[i] = from[i * 1024 + threadIdx.x];
  fixed[threadIdx.x % 28] = kept[7];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 100; ++i) static_cast<float*>(args.buffers[1])[i * 999 + threadIdx.x] = kept[i] + fixed[i % 28];
}
"""


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("JAXCG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXCG_DUMP_DIR", raising=False)
    cache._compile.cache_clear()
    yield tmp_path / "cache"
    cache._compile.cache_clear()


class TestPackage:
    def test_metadata_says_what_the_project_file_says(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        metadata = importlib.metadata.metadata("jaxcg")
        assert metadata["Version"] == project["version"] == "0.1.0"
        assert metadata["License-Expression"] == "Apache-2.0"
        assert metadata["Requires-Python"] == ">=3.11"
        assert set(metadata.get_all("Provides-Extra") or []) >= {"flax", "cuda12", "cuda13", "examples", "test"}

    def test_handler_was_built_for_an_ffi_that_this_jaxlib_runs(self) -> None:
        major, minor = ffi.require_extension().ffi_api_version.split(".")
        assert int(major) == 0
        assert int(minor) >= 1

    def test_import_touches_no_backend_driver_or_compiler(self) -> None:
        script = """
import sys, jaxcg, jaxcg.runtime.ffi
from jax._src import xla_bridge
assert not xla_bridge._backends, "a backend was started"
maps = open("/proc/self/maps").read()
for library in ("libcuda.so", "libnvrtc"):
    assert library not in maps, library
"""
        subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=120, cwd=ROOT)

    def test_without_the_extension_import_works_and_cuda_says_how_to_build_it(self) -> None:
        script = """
import sys
sys.modules["jaxcg._cuda_ffi"] = None
import jaxcg
from jaxcg._errors import MissingLibraryError
from jaxcg.runtime.ffi import require_extension
assert jaxcg.TensorProduct.full("0e + 1o", "1o").irreps_out.dim > 0
try:
    require_extension()
except MissingLibraryError as error:
    assert "_cuda_ffi" in str(error) and "pip install ." in str(error), error
else:
    raise AssertionError("no error")
"""
        subprocess.run([sys.executable, "-c", script], check=True, timeout=120, cwd=ROOT)

    @pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver")
    def test_without_a_driver_the_handler_names_the_library(self) -> None:
        problem = ffi.require_extension().driver_problem()
        assert "libcuda.so.1" in problem
        assert "install the driver" in problem


class TestCompiler:
    @pytest.mark.parametrize("target", nvrtc.EXPORT_TARGETS)
    def test_report_counts_registers_memory_and_code(self, target: str) -> None:
        reversing = nvrtc.compile_source(REVERSE, target)
        (report,) = reversing.reports
        assert reversing.image.startswith(b"\x7fELF")
        assert report.name == "reverse"
        assert 4 <= report.registers <= 32
        assert (report.spill_stores, report.spill_loads, report.static_shared) == (0, 0, 0)
        # Machine instructions are 16 bytes long, and the sections are padded to 128.
        assert 128 <= report.code_bytes <= 4096
        assert report.code_bytes % 128 == 0

        (report,) = nvrtc.compile_source(SPILLING, target).reports
        assert report.registers <= 64
        assert report.spill_stores > 0
        assert report.spill_loads > 0
        assert report.stack_frame > 0
        assert report.static_shared == 112

    def test_reports_belong_to_their_kernels(self) -> None:
        text = REVERSE + SPILLING.partition("\n")[2]
        alone = [nvrtc.compile_source(source, "sm_90").reports[0] for source in (REVERSE, SPILLING)]
        assert nvrtc.compile_source(text, "sm_90").reports == tuple(alone)

    def test_refused_text_shows_log_and_lines(self) -> None:
        text = REVERSE.replace("args.sizes[0]", "args.nothing[0]")
        with pytest.raises(nvrtc.CompileError) as caught:
            nvrtc.compile_source(text, "sm_90")
        assert "for sm_90" in str(caught.value)
        assert "kernel.cu(7): error" in str(caught.value)
        assert ">     7 |" in str(caught.value)
        assert "nothing" in caught.value.log
        assert caught.value.source == text

    def test_no_fast_mathematics_by_default(self) -> None:
        text = 'extern "C" __global__ void divide(float* x) { x[0] = x[1] / x[2]; }'
        exact = nvrtc.compile_source(text, "compute_90").image
        fast = nvrtc.compile_source(text, "compute_90", ("--use_fast_math",)).image
        assert b"div.rn.f32" in exact
        assert b"div.rn.f32" not in fast

    def test_targets_follow_the_devices(self) -> None:
        assert nvrtc.targets(["8.0", "9.0", "8.0"]) == ("sm_80", "sm_90")
        assert nvrtc.targets([]) == ("sm_80", "sm_90", "sm_100")

    def test_device_newer_than_the_compiler_gets_portable_text(self) -> None:
        (target,) = nvrtc.targets(["99.9"])
        assert target == f"compute_{nvrtc.supported_architectures()[-1]}"
        image = nvrtc.compile_source(REVERSE, target)
        assert b".visible .entry reverse" in image.image
        assert image.reports == ()

    def test_device_older_than_the_compiler_is_refused(self) -> None:
        with pytest.raises(UnsupportedError, match=r"compute capability 7.5 or higher, got one of 3.5"):
            nvrtc.target_of("3.5", (75, 80, 90))

    def test_missing_compiler_names_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(["/nowhere/libnvrtc.so.13"]))
        with pytest.raises(MissingLibraryError, match="nvidia-cuda-nvrtc"):
            nvrtc._load.__wrapped__()


class TestCache:
    def count(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        compiled: list[str] = []
        compile_source = nvrtc.compile_source

        def counting(source: str, target: str, options: tuple[str, ...] = ()) -> nvrtc.CompiledImage:
            compiled.append(target)
            return compile_source(source, target, options)

        monkeypatch.setattr(nvrtc, "compile_source", counting)
        return compiled

    def files(self, folder: Path) -> list[Path]:
        return [path for path in folder.rglob("*") if path.is_file()]

    def test_second_process_compiles_nothing(self, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = cache.compile_cached(REVERSE, "sm_90")
        assert cache.compile_cached(REVERSE, "sm_90") is first
        compiled = self.count(monkeypatch)
        cache._compile.cache_clear()
        assert cache.compile_cached(REVERSE, "sm_90") == first
        assert compiled == []
        (path,) = self.files(cache_folder)
        assert path.stem == cache.key_of(REVERSE, "sm_90", (), nvrtc.version())

    def test_key_covers_everything_that_is_compiled(self) -> None:
        keys = [
            cache.key_of(*fields)
            for fields in (
                ("a", "sm_90", (), (13, 0)),
                ("b", "sm_90", (), (13, 0)),
                ("a", "sm_80", (), (13, 0)),
                ("a", "sm_90", ("-lineinfo",), (13, 0)),
                ("a", "sm_90", ("-line", "info"), (13, 0)),
                ("a", "sm_90", (), (12, 9)),
            )
        ]
        assert len(set(keys)) == len(keys)
        assert all(len(key) == 64 for key in keys)

    @pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "foreign"])
    def test_damaged_file_is_set_aside_and_built_again(
        self, damage: str, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        image = cache.compile_cached(REVERSE, "sm_90")
        (path,) = self.files(cache_folder)
        content = path.read_bytes()
        middle = len(content) // 2
        damaged = {
            "cut": content[:middle],
            "empty": b"",
            "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "foreign": b"another program's file",
        }[damage]
        path.write_bytes(damaged)
        cache._compile.cache_clear()
        compiled = self.count(monkeypatch)
        with pytest.warns(RuntimeWarning, match="damaged"):
            assert cache.compile_cached(REVERSE, "sm_90") == image
        assert compiled == ["sm_90"]
        assert path.read_bytes() == content
        assert path.with_suffix(".corrupt").read_bytes() == damaged

    def test_killed_while_writing_leaves_no_entry(self, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # The process dies by SIGKILL when half of the file is written, then again just before the file is moved.
        script = """
import os, signal, sys, tempfile
from jaxcg.runtime import cache
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "write":
    make = tempfile.NamedTemporaryFile
    def half(**options):
        file = make(**options)
        write = file.write
        file.write = lambda content: (write(content[: len(content) // 2]), file.flush(), die())
        return file
    tempfile.NamedTemporaryFile = half
else:
    os.replace = die
cache.compile_cached(sys.stdin.read(), "sm_90")
"""
        for moment in ("write", "move"):
            killed = subprocess.run(
                [sys.executable, "-c", script, moment], input=REVERSE, text=True, timeout=120, cwd=ROOT, check=False
            )
            assert killed.returncode == -9
        leftovers = self.files(cache_folder)
        assert len(leftovers) == 2
        assert all(path.name.startswith(".writing-") for path in leftovers)
        compiled = self.count(monkeypatch)
        image = cache.compile_cached(REVERSE, "sm_90")
        assert compiled == ["sm_90"]
        cache._compile.cache_clear()
        assert cache.compile_cached(REVERSE, "sm_90") == image
        assert compiled == ["sm_90"]

    def test_folder_that_cannot_be_written_warns_and_works(
        self, tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("JAXCG_CACHE_DIR", str(tmp_path / "file" / "below"))
        with pytest.warns(RuntimeWarning, match="JAXCG_CACHE_DIR"):
            assert cache.compile_cached(REVERSE, "sm_90").reports[0].name == "reverse"

    def test_dump_writes_text_even_of_what_does_not_compile(
        self, tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("JAXCG_DUMP_DIR", str(tmp_path / "dump"))
        cache.compile_cached(REVERSE, "sm_80", label="reversal")
        names = sorted(path.name.partition(".")[2] for path in self.files(tmp_path / "dump"))
        assert names == ["cu", "sm_80.cubin", "sm_80.log"]
        with pytest.raises(nvrtc.CompileError):
            cache.compile_cached("nonsense", "sm_80", label="broken")
        (broken,) = (tmp_path / "dump").glob("broken-*")
        assert broken.read_text() == "nonsense"


class TestAttributes:
    GOOD = call_attributes([b"one", b"second"], "text", [Launch("f", 128, 0, 10, True)], [5], [0], "a product")

    def fault(self, **changes: Any) -> str:
        values = {**self.GOOD, **changes}
        del values["problem"]
        lists = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}
        return ffi.require_extension().find_fault(**lists)

    def test_types_are_those_of_the_handler(self) -> None:
        assert {name: type(value) for name, value in self.GOOD.items()} == {
            "digest": str,
            "images": bytes,
            "image_sizes": np.ndarray,
            "names": str,
            "launches": np.ndarray,
            "sizes": np.ndarray,
            "zeroed": np.ndarray,
            "problem": str,
        }
        assert all(value.dtype == np.int64 for value in self.GOOD.values() if isinstance(value, np.ndarray))
        assert self.fault() == ""

    def test_digest_covers_images_and_names(self) -> None:
        def digest(images: list[bytes], text: str, name: str) -> str:
            return call_attributes(images, text, [Launch(name, 1, 0, 1, False)], [], [], "")["digest"]

        digests = {
            digest([b"ab"], "t", "f"),
            digest([b"ab"], "t", "g"),
            digest([b"a", b"b"], "t", "f"),
            digest([b"ab"], "u", "f"),
        }
        assert len(digests) == 4

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"digest": "short"}, "digest must be 64"),
            ({"digest": "G" * 64}, "digest must be 64"),
            ({"image_sizes": []}, "at least one image"),
            ({"image_sizes": [3, 7]}, "9 bytes of images, got a size of 7 with 6 bytes left"),
            ({"image_sizes": [3]}, "6 bytes are left over"),
            ({"image_sizes": [3, 2**63 - 1]}, "got a size of 9223372036854775807"),
            ({"image_sizes": [-1, 10]}, "must be positive"),
            ({"launches": []}, "at least one launch"),
            ({"launches": [1, 0, 1, 0]}, "5 integers per launch"),
            ({"launches": [128, 0, 10, 0, 0] * 513}, "at most 512 launches"),
            ({"launches": [128, 0, 10, 0, 0] * 2}, "names must hold one kernel per launch: expected 2, got 1"),
            ({"names": ""}, "expected 1, got 0"),
            ({"names": "f\ng"}, "expected 1, got 2"),
            ({"launches": [0, 0, 10, 0, 0]}, "threads must be in [1, 1024], got 0"),
            ({"launches": [1025, 0, 10, 0, 0]}, "got 1025"),
            ({"launches": [128, -1, 10, 0, 0]}, "number of bytes >= 0, got -1"),
            ({"launches": [128, 0, 2**31, 0, 0]}, "max_blocks must be in [0, 2147483647], got 2147483648"),
            ({"launches": [128, 0, 10, 2, 0]}, "persistent must be 0 or 1, got 2"),
            ({"launches": [128, 0, 10, 0, 1]}, "launch 0: early must be 0 or 1, and 0 for the first, got 1"),
            ({"launches": [128, 0, 10, 0, 0] * 2, "names": "f\ng"}, ""),
            ({"launches": [128, 0, 10, 0, 0, 128, 0, 10, 0, 2], "names": "f\ng"}, "launch 1: early must be 0 or 1"),
            ({"sizes": [0] * 513}, "sizes must fit"),
            ({"zeroed": [-1]}, "result numbers >= 0, got -1"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_handler_says_what_is_wrong(self, changes: dict[str, Any], message: str) -> None:
        assert message in self.fault(**changes)

    @pytest.mark.parametrize(
        ("threads", "blocks", "message"), [(2048, 1, "threads"), (128, 2**31, "max_blocks"), (128, -1, "max_blocks")]
    )
    def test_launch_refuses_what_no_device_can_do(self, threads: int, blocks: int, message: str) -> None:
        with pytest.raises(JaxcgError, match=message):
            Launch("f", threads, 0, blocks, False)

    def test_export_without_a_gpu_carries_the_call(self) -> None:
        def call(x: jax.Array) -> jax.Array:
            images = [nvrtc.compile_source(REVERSE, target) for target in nvrtc.targets([])]
            attributes = call_attributes(images, "text", [Launch("reverse", 128, 512, 1, False)], [1], [], "a product")
            return jax.ffi.ffi_call(ffi.TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, **attributes)

        checks = [jax.export.DisabledSafetyCheck.custom_call(ffi.TARGET)]
        exported = jax.export.export(jax.jit(call), platforms=["cuda"], disabled_checks=checks)(jnp.zeros(128))
        text = exported.mlir_module()
        assert text.count("stablehlo.custom_call @jaxcg_launch(") == 1
        assert 'names = "reverse"' in text
        assert "zeroed = dense<> : tensor<0xi64>" in text
        assert "launches = dense<[128, 512, 1, 0, 0]> : tensor<5xi64>" in text
        assert jax.export.deserialize(exported.serialize()).mlir_module() == text
