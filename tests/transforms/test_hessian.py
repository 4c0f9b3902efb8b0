"""Second derivatives: Hessians of an energy in positions, mixed ones, batches of them, and their memory."""

import itertools
from collections.abc import Callable

import e3nn_jax as e3nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcg
from tests import emulator
from tests._oracle import SCALARS, Problem, assert_close, assert_nonzero

NODES = 4
PAIRS = np.array([(a, b) for a, b in itertools.product(range(NODES), repeat=2) if a != b])
SENDERS, RECEIVERS = np.random.default_rng(0).permutation(PAIRS).astype(np.int32).T
POSITIONS = np.random.default_rng(1).standard_normal((NODES, 3)) * 1.5

# The degree of y, the channels: degrees 0 and 1 are special cases elsewhere.
PRODUCTS = {
    "degree-0": jaxcg.TensorProduct.channelwise("3x0e", "0e", "0e"),
    "degree-1": jaxcg.TensorProduct.channelwise("3x0e+2x1o", "0e+1o", "0e+1o"),
    "wide": jaxcg.TensorProduct.channelwise("33x0e+5x1o+5x1e", "0e+1o+2e", "0e+1o"),
}


def energy_of(tp: jaxcg.TensorProduct, by_e3nn: bool = False) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """An energy of positions and parameters: one convolution with weights that decay with the distance."""
    rng = np.random.default_rng(2)
    features = jnp.asarray(rng.standard_normal((NODES, tp.irreps_in1.dim)))
    shape = Problem(tp, features, features, None, jnp.asarray(SENDERS), jnp.asarray(RECEIVERS), NODES)

    def energy(positions: jax.Array, parameters: jax.Array) -> jax.Array:
        vectors = positions[RECEIVERS] - positions[SENDERS]
        y = e3nn.spherical_harmonics(tp.irreps_in2, vectors, normalize=True, normalization="component")
        w = jnp.exp(-jnp.linalg.norm(vectors, axis=1))[:, None] * parameters
        convolve = shape.convolve_by_e3nn if by_e3nn else shape.convolve
        return jnp.sum(jnp.tanh(convolve(features, y.array, w)) ** 2)

    return energy


def parameters_of(tp: jaxcg.TensorProduct) -> jax.Array:
    return jnp.asarray(np.random.default_rng(3).standard_normal(tp.weight_numel))


@pytest.mark.parametrize("tp", PRODUCTS.values(), ids=PRODUCTS)
def test_hessian_in_positions_equals_e3nn(tp: jaxcg.TensorProduct) -> None:
    positions, parameters = jnp.asarray(POSITIONS), parameters_of(tp)
    actual = jax.jit(jax.hessian(energy_of(tp)))(positions, parameters)
    expected = jax.jit(jax.hessian(energy_of(tp, by_e3nn=True)))(positions, parameters)
    assert_nonzero(actual)
    assert_close(actual, expected)


def test_the_jacobian_of_forces_is_symmetric() -> None:
    # Exact energies with forces that are not their gradient show here, and heat a simulation.
    tp = PRODUCTS["wide"]
    hessian = jax.jit(jax.hessian(energy_of(tp)))(jnp.asarray(POSITIONS), parameters_of(tp)).reshape(3 * NODES, -1)
    asymmetry = jnp.linalg.norm(hessian - hessian.T) / jnp.linalg.norm(hessian + hessian.T)
    assert asymmetry < 100 * jnp.finfo(jnp.float64).eps
    # An energy of differences does not change when everything moves.
    moved = hessian.reshape(3 * NODES, NODES, 3).sum(1)
    assert jnp.abs(moved).max() < 1e-13 * jnp.abs(hessian).max()


@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev], ids=["forward", "reverse"])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev], ids=["forward", "reverse"])
def test_every_order_of_modes(outer: Callable, inner: Callable) -> None:
    tp = PRODUCTS["degree-1"]
    arguments = jnp.asarray(POSITIONS), parameters_of(tp)
    expected = jax.jit(jax.hessian(energy_of(tp, by_e3nn=True)))(*arguments)
    assert_close(jax.jit(outer(inner(energy_of(tp))))(*arguments), expected)


def test_mixed_derivatives_of_forces_by_parameters() -> None:
    tp = PRODUCTS["degree-1"]
    arguments = jnp.asarray(POSITIONS), parameters_of(tp)
    actual, expected = (
        jax.jit(jax.jacrev(jax.grad(energy_of(tp, by_e3nn)), argnums=1))(*arguments) for by_e3nn in (False, True)
    )
    assert actual.shape == (NODES, 3, tp.weight_numel)
    assert_nonzero(actual)
    assert_close(actual, expected)


def test_hessian_of_the_product_in_all_operands() -> None:
    problem = Problem.random(SCALARS, edges=2).on_rows()

    def energy(function: Callable, *operands: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(function(*operands)))

    actual, expected = (
        jax.jit(jax.hessian(lambda *v, f=f: energy(f, *v), argnums=(0, 1, 2)))(*problem.operands)
        for f in (problem.multiply, problem.multiply_by_e3nn)
    )
    assert_nonzero(*jax.tree.leaves(actual))
    assert_close(actual, expected)


def test_vmap_of_hessian_equals_a_loop() -> None:
    tp = PRODUCTS["degree-1"]
    batch = jnp.asarray(np.random.default_rng(4).standard_normal((3, NODES, 3)))
    hessian, parameters = jax.hessian(energy_of(tp)), parameters_of(tp)
    actual = jax.jit(jax.vmap(hessian, in_axes=(0, None)))(batch, parameters)
    one = jax.jit(hessian)
    assert_nonzero(*actual)
    assert_close(actual, jnp.stack([one(positions, parameters) for positions in batch]))


def test_memory_of_a_hessian_in_chunks_grows_with_the_chunk() -> None:
    tp = jaxcg.TensorProduct.channelwise("8x0e+8x1o", "0e+1o", "0e+1o")
    nodes, edges = 64, 512
    problem = Problem.random(tp, nodes=nodes, edges=edges)

    def column(x: jax.Array, tangent: jax.Array) -> jax.Array:
        energy = lambda x: jnp.sum(problem.convolve(x, problem.y, problem.w) ** 2)  # noqa: E731
        return jax.jvp(jax.grad(energy), (x,), (tangent,))[1]

    def temporaries(columns: int, chunk: int) -> int:
        def columns_of(x: jax.Array, tangents: jax.Array) -> jax.Array:
            return jax.lax.map(lambda t: column(x, t), tangents, batch_size=chunk)

        tangents = jax.ShapeDtypeStruct((columns, *problem.x.shape), problem.x.dtype)
        memory = jax.jit(columns_of).lower(problem.x, tangents).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert temporaries(64, 2) < 1.1 * temporaries(8, 2)
    assert temporaries(64, 8) > 2 * temporaries(64, 2)


def test_emulated_hessian() -> None:
    problem = Problem.random(SCALARS, nodes=2, edges=3)

    def energy(x: jax.Array) -> jax.Array:
        return jnp.sum(problem.convolve(x, problem.y, problem.w) ** 4)

    expected = jax.jit(jax.hessian(energy))(problem.x)
    with emulator.emulated():
        assert_close(jax.jit(jax.hessian(energy))(problem.x), expected)
