"""The names that others are written against, and what importing them does (nothing)."""

import copy
import inspect
import os
import pickle
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import e3nn_jax as e3nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcg
from tests._oracle import SMALL, Problem, assert_close

REPOSITORY = Path(__file__).parents[1]
SIGNATURES = {
    "TensorProduct": (
        "irreps_in1, irreps_in2, irreps_out, instructions, *, irrep_normalization=None, path_normalization=None,"
        " layout='mul_ir'"
    ),
    "TensorProduct.channelwise": (
        "irreps_in1, irreps_in2, filter_ir_out=None, *, weight_order='path', irrep_order='jax',"
        " irrep_normalization=None, path_normalization=None, layout='mul_ir'"
    ),
    "TensorProduct.fully_connected": (
        "irreps_in1, irreps_in2, irreps_out, *, irrep_normalization=None, path_normalization=None, layout='mul_ir'"
    ),
    "TensorProduct.full": ("irreps_in1, irreps_in2, filter_ir_out=None, *, irrep_normalization=None, layout='mul_ir'"),
    "TensorProduct.elementwise": (
        "irreps_in1, irreps_in2, filter_ir_out=None, *, irrep_normalization=None, layout='mul_ir'"
    ),
    "TensorProduct.__call__": "self, x, y, w=None, *, impl='auto'",
    "TensorProduct.convolve": (
        "self, x, y, w=None, senders=None, receivers=None, *, num_nodes, receivers_sorted=False, edge_order=None,"
        " check_sorted=False, deterministic=False, compensated=False, impl='auto'"
    ),
    "TensorProduct.explain": "self",
    "TensorProduct.kernel_support": "self",
    "sort_edges": "senders, receivers, num_nodes",
    "path_taken": "tp, *, convolution=True, impl='auto', platform=None",
    "e3nn.tensor_product": ("input1, input2, *, filter_ir_out=None, irrep_normalization=None, regroup_output=True"),
}
ERRORS = (
    "JaxcgError", "DtypeError", "GraphError", "InstructionError", "IrrepsError", "MissingLibraryError", "OptionError",
    "ShapeError", "UnsupportedError",
)  # fmt: skip


def attribute(path: str) -> Any:
    found: Any = jaxcg
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path: str) -> None:
    parameters = inspect.signature(attribute(path)).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert str(inspect.Signature(bare))[1:-1] == SIGNATURES[path]


def test_the_drop_in_has_the_signature_of_what_it_replaces() -> None:
    theirs = inspect.signature(e3nn.tensor_product).parameters
    ours = inspect.signature(jaxcg.e3nn.tensor_product).parameters
    shared = [name for name in theirs if name in ours]
    assert shared == list(ours)
    # What is left out are choices of the implementation alone.
    assert set(theirs) - set(ours) <= {"custom_einsum_jvp", "fused"}
    assert [(ours[n].kind, ours[n].default) for n in shared] == [(theirs[n].kind, theirs[n].default) for n in shared]


def test_arguments_of_the_convolution_front_end() -> None:
    parameters = inspect.signature(jaxcg.e3nn.convolve).parameters
    assert {"x", "y", "w", "senders", "receivers", "num_nodes", "filter_ir_out", "scale"} <= set(parameters)
    assert parameters["num_nodes"].kind is inspect.Parameter.KEYWORD_ONLY


def test_names() -> None:
    for error in ERRORS:
        assert issubclass(attribute(error), jaxcg.JaxcgError) and issubclass(attribute(error), ValueError)
    for name in ("irreps_in1", "irreps_in2", "irreps_out", "instructions", "weight_numel", "layout"):
        assert hasattr(SMALL, name)
    for framework in ("linen", "nnx"):
        for module in ("TensorProduct", "Convolution"):
            assert inspect.isclass(attribute(f"flax.{framework}.{module}"))
    with pytest.raises(AttributeError, match="no_such_name"):
        attribute("no_such_name")


def test_a_product_is_plain_data() -> None:
    tp = jaxcg.TensorProduct.channelwise("2x0e+1o", "0e+1o", "0e+1o")
    assert all(isinstance(irreps, e3nn.Irreps) for irreps in (tp.irreps_in1, tp.irreps_in2, tp.irreps_out))
    assert isinstance(tp.instructions, tuple)
    assert tp.instructions[0] == (0, 0, 0, "uvu", True, 1.0)
    assert {type(value) for instruction in tp.instructions for value in instruction} == {int, str, bool, float}
    again = jaxcg.TensorProduct(tp.irreps_in1, tp.irreps_in2, tp.irreps_out, tp.instructions)
    assert again == tp and hash(again) == hash(tp) and again is not tp
    assert jaxcg.TensorProduct.channelwise("2x0e+1o", "0e+1o", "0e+1o", layout="ir_mul") != tp
    with pytest.raises(FrozenInstanceError):
        tp.layout = "ir_mul"  # type: ignore[misc]


@pytest.mark.parametrize("tp", [
    SMALL, jaxcg.TensorProduct.full("2x1o", "1e"), jaxcg.TensorProduct.fully_connected("2x1o", "3x1e", "0o"),
], ids=["channelwise", "full", "fully-connected"])  # fmt: skip
def test_pickles_and_copies(tp: jaxcg.TensorProduct) -> None:
    # Kernels and compiled programs are no part of a product, so a model that was saved on a GPU loads anywhere.
    tp.kernel_support()
    tp.explain()
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(tp, protocol))
        assert again == tp and hash(again) == hash(tp)
    assert len(pickle.dumps(tp)) < 3000
    assert copy.copy(tp) == copy.deepcopy(tp) == tp


def test_defaults_of_convolve() -> None:
    problem = Problem.random(SMALL)
    plain = problem.convolve(*problem.operands)
    spelled_out = SMALL.convolve(
        x=problem.x, y=problem.y, w=problem.w, senders=problem.senders, receivers=problem.receivers,
        num_nodes=problem.num_nodes, receivers_sorted=False, edge_order=None, check_sorted=False,
        deterministic=False, compensated=False, impl="auto",
    )  # fmt: skip
    np.testing.assert_array_equal(plain, spelled_out)
    np.testing.assert_array_equal(plain, problem.convolve(*problem.operands, impl="xla"))
    assert_close(plain, problem.convolve_by_e3nn(*problem.operands))


def test_the_path_that_a_call_takes() -> None:
    assert SMALL.kernel_support().ok and jaxcg.path_taken(SMALL, platform="cuda") == "cuda"
    assert jaxcg.path_taken(SMALL, platform="cpu") == jaxcg.path_taken(SMALL, impl="xla", platform="cuda") == "xla"
    assert jaxcg.path_taken(SMALL) == ("cuda" if jax.default_backend() in ("cuda", "gpu") else "xla")
    full = jaxcg.TensorProduct.full("2x1o", "1e")
    assert not full.kernel_support().ok and "uvuv" in full.kernel_support().reason
    assert "uvuv" in full.explain()


def run(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORT_QUIETLY = """
import os, sys
sys.modules["flax"] = None  # any import of it fails (e3nn_jax loads it where it finds it)
import e3nn_jax, jax, jax.ffi, jaxtyping, numpy  # what these do is not jaxcg's
from jax.extend import core
from jax.interpreters import ad, batching, mlir
loaded = set(sys.modules)

opened, read = [], []
def audit(event, arguments):
    if event in ("open", "os.mkdir", "subprocess.Popen", "socket.connect", "ctypes.dlopen"):
        opened.append((event, str(arguments[0])))
sys.addaudithook(audit)
class Watched(dict):
    def watch(self, name):
        frame = sys._getframe(2)
        while frame is not None:
            if "jaxcg" in frame.f_globals.get("__name__", ""):
                read.append(name)
            frame = frame.f_back
    def __getitem__(self, name):
        self.watch(name)
        return dict.__getitem__(self, name)
    def get(self, name, default=None):
        self.watch(name)
        return dict.get(self, name, default)
plain = os.environ
os.environ = Watched(plain)

import jaxcg
os.environ = plain
new = set(sys.modules) - loaded
assert not [name for name in new if name.startswith(("jaxcg.codegen", "jaxcg.schedule", "jaxcg.e3nn", "jaxcg.flax"))]
code = [path for event, path in opened if event == "open" and path.endswith((".py", ".pyc", ".so"))]
others = [(event, path) for event, path in opened if path not in code and path != "None"]
assert not [item for item in others if not os.path.isdir(item[1])], others
assert not read, read
from jax._src import xla_bridge
assert not xla_bridge._backends, "a backend was started"

tp = jaxcg.TensorProduct.channelwise("8x0e+8x1o", "0e+1o", "0e+1o")
tp.explain(), tp.kernel_support(), tp.weight_numel
assert not xla_bridge._backends, "describing a product started a backend"
jaxcg.e3nn.tensor_product
assert not xla_bridge._backends
print("quiet")
"""


def test_importing_reads_nothing_and_starts_nothing() -> None:
    assert run(IMPORT_QUIETLY) == "quiet\n"


WITHOUT_FLAX = """
import sys
sys.modules["flax"] = None
import jaxcg, jaxcg.e3nn
try:
    jaxcg.flax.linen
except ImportError as error:
    print(type(error).__name__)
"""


def test_flax_is_optional() -> None:
    assert run(WITHOUT_FLAX).strip() in ("ImportError", "ModuleNotFoundError", "MissingLibraryError")


WITHOUT_EXTENSION = """
import sys
sys.modules["jaxcg._cuda_ffi"] = None  # never built
sys.modules["nvidia"] = None           # no library of CUDA
import jax, jax.export, jax.numpy as jnp, jaxcg
tp = jaxcg.TensorProduct.channelwise("4x0e", "0e+1o")
assert tp(jnp.ones((3, 4)), jnp.ones((3, 4)), jnp.ones(tp.weight_numel)).shape == (3, 16)
try:
    jax.export.export(jax.jit(tp), platforms=["cuda"])(jnp.ones((3, 4)), jnp.ones((3, 4)), jnp.ones(8))
except jaxcg.MissingLibraryError as error:
    print(error)
"""


def test_a_build_without_the_handler_computes_on_the_cpu_and_says_what_is_missing_for_cuda() -> None:
    message = run(WITHOUT_EXTENSION)
    assert "jaxcg._cuda_ffi" in message and "pip install" in message and "impl='xla'" in message


def test_the_example_of_the_first_page() -> None:
    # Every line of it runs, in order; its results are those printed.
    import doctest

    failed, attempted = doctest.testfile(
        str(REPOSITORY / "README.md"),
        module_relative=False,
        optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS,
    )
    assert attempted > 5 and failed == 0


def test_names_outside_the_documented_interface_of_jax_are_in_one_file() -> None:
    # JAX moves them between releases.
    files = sorted((REPOSITORY / "jaxcg").rglob("*.py"))
    assert len(files) > 20
    private = re.compile(r"jax\._src|jax\.interpreters|jax\.extend|from jax import (core|interpreters)")
    found = {str(file.relative_to(REPOSITORY)) for file in files if private.search(file.read_text())}
    assert found == {"jaxcg/_jax_internals.py"}


def test_results_have_the_shape_and_dtype_that_are_promised() -> None:
    tp = jaxcg.TensorProduct.channelwise("8x0e+8x1o", "0e+1o+2e", filter_ir_out="0e+1o")
    for dtype in ("float32", "float64"):
        x, y, w = (jnp.ones((2, 3, n), dtype) for n in (tp.irreps_in1.dim, tp.irreps_in2.dim, tp.weight_numel))
        z = tp(x, y, w)
        assert (z.shape, z.dtype) == ((2, 3, tp.irreps_out.dim), jnp.dtype(dtype))
        assert tp(x[0, 0], y[0, 0], w[0, 0]).shape == (tp.irreps_out.dim,)
        assert tp(x[:, :1], y[:1], w[0, 0]).shape == z.shape
