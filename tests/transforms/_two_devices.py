"""Checks on two CPU devices, in a process of their own: the number of devices is fixed when a process starts.

Prints one JSON object: the name of each check, and what it found.
"""

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcg import UnsupportedError
from tests import emulator
from tests._oracle import SCALARS, SMALL, Problem, assert_close, assert_nonzero

Spec = PartitionSpec
CHECKS: dict[str, Callable[[], object]] = {}


def check(function: Callable[[], object]) -> Callable[[], object]:
    CHECKS[function.__name__] = function
    return function


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("d",))


def spread(function: Callable, in_specs: tuple, out_specs: object) -> Callable:
    return jax.shard_map(function, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=True)


def edges_spread(problem: Problem) -> Callable[..., jax.Array]:
    """The convolution with the edges divided among devices, x everywhere, z summed."""

    def local(x: jax.Array, y: jax.Array, w: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        z = problem.tp.convolve(x, y, w, senders, receivers, num_nodes=problem.num_nodes)
        return jax.lax.psum(z, "d")

    weights = Spec() if problem.w.ndim == 1 else Spec("d")
    function = spread(local, (Spec(), Spec("d"), weights, Spec("d"), Spec("d")), Spec())
    return lambda x, y, w: function(x, y, w, problem.senders, problem.receivers)


def gradients(convolve: Callable, operands: tuple[jax.Array, ...]) -> list[jax.Array]:
    return jax.jit(jax.value_and_grad(lambda *v: jnp.sum(jnp.tanh(convolve(*v))), argnums=(0, 1, 2)))(*operands)


def edge_sharded_gradients(problem: Problem) -> None:
    expected = gradients(problem.convolve, problem.operands)
    assert_nonzero(*jax.tree.leaves(expected))
    assert_close(gradients(edges_spread(problem), problem.operands), expected)


@check
def gradients_with_edges_divided() -> None:
    edge_sharded_gradients(Problem.random(SMALL, edges=12))


@check
def gradients_with_edges_divided_and_weights_shared() -> None:
    edge_sharded_gradients(Problem.random(SMALL, edges=12, shared=True))


@check
def emulated_gradients_with_edges_divided() -> None:
    problem = Problem.random(SCALARS, edges=12)
    expected = gradients(problem.convolve, problem.operands)
    with emulator.emulated():
        assert_close(gradients(edges_spread(problem), problem.operands), expected)


@check
def gradient_taken_inside() -> None:
    problem = Problem.random(SMALL, edges=12)

    def local(x: jax.Array, y: jax.Array, w: jax.Array, senders: jax.Array, receivers: jax.Array) -> object:
        def loss(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
            z = SMALL.convolve(x, y, w, senders, receivers, num_nodes=problem.num_nodes)
            return jnp.sum(jnp.tanh(jax.lax.psum(z, "d")))

        return jax.grad(loss, argnums=(0, 1, 2))(x, y, w)

    edge = Spec("d")
    inside = jax.jit(spread(local, (Spec(), edge, edge, edge, edge), (Spec(), edge, edge)))
    actual = inside(*problem.operands, problem.senders, problem.receivers)
    assert_close(actual, gradients(problem.convolve, problem.operands)[1])


@check
def second_derivatives_with_edges_divided() -> None:
    problem = Problem.random(SMALL, edges=12)
    tangents = problem.tangents()

    def column(convolve: Callable) -> object:
        gradient = jax.grad(lambda *v: jnp.sum(jnp.tanh(convolve(*v))), argnums=(0, 1, 2))
        return jax.jit(lambda v, t: jax.jvp(gradient, v, t)[1])(problem.operands, tangents)

    assert_close(column(edges_spread(problem)), column(problem.convolve))


def batches() -> tuple[Problem, tuple[jax.Array, ...]]:
    problems = [Problem.random(SMALL, seed=seed) for seed in range(4)]
    return problems[0], tuple(jnp.stack(v) for v in zip(*(p.operands for p in problems), strict=True))


@check
def batches_divided_under_shard_map_pmap_and_jit() -> None:
    problem, operands = batches()
    gradient = jax.vmap(jax.grad(lambda *v: jnp.sum(jnp.tanh(problem.convolve(*v))), argnums=(0, 1, 2)))
    expected = jax.jit(gradient)(*operands)
    assert_nonzero(*expected)
    assert_close(jax.jit(spread(gradient, (Spec("d"),) * 3, (Spec("d"),) * 3))(*operands), expected)
    halves = [v.reshape(2, 2, *v.shape[1:]) for v in operands]
    assert_close([v.reshape(4, *v.shape[2:]) for v in jax.pmap(gradient)(*halves)], list(expected))
    placed = [jax.device_put(v, NamedSharding(mesh(), Spec("d"))) for v in operands]
    assert_close(jax.jit(gradient)(*placed), expected)


@check
def nothing_is_gathered() -> None:
    problem = Problem.random(SMALL, edges=12)
    function = edges_spread(problem)
    gradient = jax.jit(jax.grad(lambda *v: jnp.sum(jnp.tanh(function(*v))), argnums=(0, 1, 2)))
    text = gradient.lower(*problem.operands).compile().as_text()
    assert "all-gather" not in text and "all-reduce" in text
    problem, operands = batches()
    local = jax.vmap(jax.grad(lambda *v: jnp.sum(jnp.tanh(problem.convolve(*v)))))
    text = jax.jit(spread(local, (Spec("d"),) * 3, Spec("d"))).lower(*operands).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text


@check
def xla_divides_plain_operations_and_never_a_kernel() -> None:
    # With sharded arguments and no shard_map a custom call would have all of its operands gathered on every device.
    problem = Problem.random(SCALARS, edges=12)
    graph = (problem.y, problem.w, problem.senders, problem.receivers)
    arguments = [jax.device_put(v, NamedSharding(mesh(), Spec("d"))) for v in graph]

    def convolve(y: jax.Array, w: jax.Array, senders: jax.Array, receivers: jax.Array, impl: str = "auto") -> jax.Array:
        return SCALARS.convolve(problem.x, y, w, senders, receivers, num_nodes=problem.num_nodes, impl=impl)

    with emulator.emulated():
        compiled = jax.jit(convolve).lower(*arguments).compile()
        assert "jaxcg_launch" not in compiled.as_text()
        assert_close(compiled(*arguments), problem.convolve(*problem.operands, impl="xla"))
        with pytest.raises(UnsupportedError, match="shard_map"):
            jax.jit(partial(convolve, impl="cuda")).lower(*arguments)
        assert "jaxcg_launch" in jax.jit(convolve).lower(*graph).as_text()
        inside = spread(lambda *v: jax.lax.psum(convolve(*v, impl="cuda"), "d"), (Spec("d"),) * 4, Spec())
        assert "jaxcg_launch" in jax.jit(inside).lower(*arguments).as_text()


@check
def the_second_device_alone() -> None:
    problem = Problem.random(SMALL)
    expected = gradients(problem.convolve, problem.operands)
    second = jax.devices()[1]
    actual = gradients(
        partial(
            lambda s, r, *v: SMALL.convolve(*v, s, r, num_nodes=problem.num_nodes),
            jax.device_put(problem.senders, second), jax.device_put(problem.receivers, second),
        ),
        tuple(jax.device_put(v, second) for v in problem.operands),
    )  # fmt: skip
    assert {device for v in jax.tree.leaves(actual) for device in v.devices()} == {second}
    assert_close(actual, expected)


def main() -> None:
    assert len(jax.devices()) == 2
    found = {}
    for name, function in CHECKS.items():
        try:
            function()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
