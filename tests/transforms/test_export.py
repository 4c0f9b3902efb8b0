"""Exported programs: what is in one for CUDA, made on a machine without a GPU, and one for the CPU run elsewhere."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from tests._oracle import SMALL, WIDE, Problem, assert_close

CHECKS = [jax.export.DisabledSafetyCheck.custom_call("jaxcg_launch")]


def exported(function: Callable, *arguments: jax.Array, platform: str = "cuda") -> jax.export.Exported:
    return jax.export.export(jax.jit(function), platforms=[platform], disabled_checks=CHECKS)(*arguments)


def results_of_calls(text: str) -> list[list[tuple[int, ...]]]:
    """Shapes of all results of every `jaxcg_launch` call of a program, scratch memory included."""
    calls = [line for line in text.splitlines() if "@jaxcg_launch" in line]
    shapes = [re.findall(r"tensor<((?:\d+x)*)[a-z]\w*>", line.rpartition("->")[2]) for line in calls]
    return [[tuple(map(int, shape.split("x")[:-1])) for shape in results] for results in shapes]


def outputs(problem: Problem) -> dict[str, tuple[int, ...]]:
    return dict(zip("xyw", (v.shape for v in problem.operands), strict=True)) | {
        "z": (problem.num_nodes, problem.tp.irreps_out.dim)
    }


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_call_forward_and_one_more_for_the_whole_backward(dtype: str) -> None:
    problem = Problem.random(WIDE, nodes=30, edges=200, dtype=dtype)
    shapes = outputs(problem)

    def loss(*operands: jax.Array) -> jax.Array:
        return jnp.sum(problem.convolve(*operands) ** 2)

    (forward,) = results_of_calls(exported(problem.convolve, *problem.operands).mlir_module())
    assert shapes["z"] in forward
    first, second = results_of_calls(exported(jax.grad(loss, argnums=(0, 1, 2)), *problem.operands).mlir_module())
    assert shapes["z"] in first
    assert [shapes[slot] for slot in "xyw"] == second[:3]


def test_double_backward_is_one_more_call() -> None:
    problem = Problem.random(SMALL, nodes=30, edges=200, dtype="float32")

    def penalty(w: jax.Array) -> jax.Array:
        energy = lambda x, y: jnp.sum(problem.convolve(x, y, w) ** 2)  # noqa: E731
        return sum(jnp.sum(g**2) for g in jax.grad(energy, argnums=(0, 1))(problem.x, problem.y))

    calls = results_of_calls(exported(jax.grad(penalty), problem.w).mlir_module())
    # Forward, its backward by x and y, and the reverse of each.
    assert len(calls) == 4


def test_the_gradient_of_y_alone_holds_nothing_of_the_size_of_the_weights() -> None:
    problem = Problem.random(WIDE, nodes=30, edges=200, dtype="float32")

    def loss(y: jax.Array) -> jax.Array:
        return jnp.sum(problem.convolve(problem.x, y, problem.w) ** 2)

    calls = results_of_calls(exported(jax.grad(loss), problem.y).mlir_module())
    assert len(calls) == 2 and problem.y.shape in calls[1]
    sizes = [prod(shape) for results in calls for shape in results]
    assert max(sizes) < problem.w.size
    assert problem.w.size not in sizes


def test_no_gather_of_features_to_edges() -> None:
    problem = Problem.random(WIDE, nodes=30, edges=200, dtype="float32")

    def loss(*operands: jax.Array) -> jax.Array:
        return jnp.sum(problem.convolve(*operands) ** 2)

    text = exported(jax.grad(loss, argnums=(0, 1, 2)), *problem.operands).mlir_module()
    for dim in (WIDE.irreps_in1.dim, WIDE.irreps_out.dim):
        assert f"tensor<200x{dim}x" not in text


def test_a_batch_adds_no_calls() -> None:
    problem = Problem.random(SMALL, nodes=30, edges=200, dtype="float32")
    batch = [jnp.stack([v, v]) for v in problem.operands]
    gradient = jax.vmap(jax.grad(lambda *v: jnp.sum(problem.convolve(*v) ** 2), argnums=(0, 1, 2)))
    text = exported(gradient, *batch).mlir_module()
    assert len(results_of_calls(text)) == 2


def test_serialised_for_cuda_and_read_back() -> None:
    problem = Problem.random(SMALL, dtype="float32")
    whole = exported(problem.convolve, *problem.operands)
    again = jax.export.deserialize(whole.serialize())
    assert again.platforms == ("cuda",)
    assert again.mlir_module().count("@jaxcg_launch") == whole.mlir_module().count("@jaxcg_launch") == 1
    with pytest.raises(ValueError, match=r"(?i)platform"):
        again.call(*problem.operands)


RUN_ELSEWHERE = """
import sys
import jax
import jax.export
import numpy as np
folder = sys.argv[1]
program = jax.export.deserialize(open(folder + "/program", "rb").read())
operands = np.load(folder + "/operands.npz")
results = jax.jit(program.call)(*(operands[name] for name in operands.files))
np.savez(folder + "/results.npz", *results)
assert "jaxcg" not in sys.modules
"""


def test_a_program_for_the_cpu_runs_in_a_process_without_jaxcg(tmp_path: Path) -> None:
    problem = Problem.random(SMALL)
    gradient = jax.grad(lambda *v: jnp.sum(problem.convolve(*v) ** 2), argnums=(0, 1, 2))
    program = exported(gradient, *problem.operands, platform="cpu")
    assert "jaxcg_launch" not in program.mlir_module()
    (tmp_path / "program").write_bytes(program.serialize())
    np.savez(tmp_path / "operands.npz", *map(np.asarray, problem.operands))
    environment = os.environ | {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    subprocess.run(
        [sys.executable, "-c", RUN_ELSEWHERE, str(tmp_path)], env=environment, check=True, timeout=120, cwd=tmp_path
    )
    with np.load(tmp_path / "results.npz") as results:
        assert_close([results[name] for name in results.files], list(gradient(*problem.operands)))


def test_a_program_for_both_platforms_and_any_number_of_batches() -> None:
    # Export for several platforms at once keeps both paths.
    problem = Problem.random(SMALL, dtype="float32")
    both = jax.export.export(jax.jit(problem.convolve), platforms=["cpu", "cuda"], disabled_checks=CHECKS)
    program = jax.export.deserialize(both(*problem.operands).serialize())
    assert program.mlir_module().count("@jaxcg_launch") == 1
    assert_close(program.call(*problem.operands), problem.convolve(*problem.operands))
