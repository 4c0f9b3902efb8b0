"""The calculus of term sets, on random ones, against JAX's derivatives of what they mean."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcg._terms import SLOTS, Output, Term, TermSet, forward, jvp, prune, transpose

SIZES = {"x": 3, "y": 2, "w": 4, "z": 5}
FORM = np.random.default_rng(0).standard_normal([SIZES[slot] for slot in SLOTS])
SEEDS = range(25)
Arrays = list[jax.Array]


def evaluate(terms: TermSet, operands: Arrays) -> Arrays:
    """The outputs, with F a random 4-linear form on vectors: all that the calculus may assume of it."""
    results = []
    for out in terms.outputs:
        total = jnp.zeros(SIZES[out.slot])
        for term in out.terms:
            spec, arrays = "xywz", [jnp.asarray(FORM)]
            for slot in SLOTS:
                number = term[slot]
                if number is None and slot == out.slot:
                    continue
                spec += f",{slot}"
                arrays.append(jnp.ones(SIZES["w"]) if number is None else operands[number])
            total += jnp.einsum(f"{spec}->{out.slot}", *arrays)
        results.append(total)
    return results


def random_terms(seed: int, weighted: bool = True) -> TermSet:
    """Operands of random slots, outputs that leave random slots open, sums of up to three terms (or none)."""
    rng = np.random.default_rng(seed)
    slots = [slot for slot in SLOTS if weighted or slot != "w"]
    operands = [*slots, *rng.choice(slots, rng.integers(0, 5))]
    rng.shuffle(operands)
    holders = {slot: [n for n, held in enumerate(operands) if held == slot] for slot in SLOTS}

    def term(open_slot: str) -> Term:
        filled = {slot: int(rng.choice(holders[slot])) for slot in slots if slot != open_slot}
        return Term(**{slot: filled.get(slot) for slot in SLOTS})

    outputs = [
        Output(slot, tuple(term(slot) for _ in range(rng.integers(0, 4))))
        for slot in rng.choice(slots, rng.integers(1, 4))
    ]
    return TermSet(tuple(map(str, operands)), tuple(outputs))


def arrays(slots: tuple[str, ...], seed: int = 1) -> Arrays:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(SIZES[slot])) for slot in slots]


def assert_equal(actual: Arrays, expected: Arrays) -> None:
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "unweighted"])
@pytest.mark.parametrize("seed", SEEDS)
def test_jvp_of_random_terms(seed: int, weighted: bool) -> None:
    terms = random_terms(seed, weighted)
    operands, rng = arrays(terms.operands), np.random.default_rng(seed)
    moves = (rng.random(len(operands)) < 0.6).tolist()
    tangents = [t for t, m in zip(arrays(terms.operands, 2), moves, strict=True) if m]
    given = iter(tangents)
    full = [next(given) if m else jnp.zeros_like(v) for v, m in zip(operands, moves, strict=True)]
    _, expected = jax.jvp(lambda *v: evaluate(terms, list(v)), operands, full)
    pushed = jvp(terms, moves)
    assert pushed.operands == terms.operands + tuple(s for s, m in zip(terms.operands, moves, strict=True) if m)
    assert_equal(evaluate(pushed, operands + tangents), expected)
    # An output without terms is a promise that it does not move.
    for out, tangent in zip(pushed.outputs, expected, strict=True):
        assert out.terms or not np.any(tangent)


def linear_sets(terms: TermSet, rng: np.random.Generator) -> list[bool]:
    """Operands in which all terms are linear jointly: random ones, none of which meet in a term."""
    linear: set[int] = set()
    for number in rng.permutation(len(terms.operands)).tolist():
        held = [set(term.operands()) for out in terms.outputs for term in out.terms]
        if all(len(operands & (linear | {number})) <= 1 for operands in held):
            linear.add(number)
    return [n in linear for n in range(len(terms.operands))]


def only_linear(terms: TermSet, linear: list[bool]) -> TermSet:
    """Without the terms that hold no linear operand: those are constants, not linear."""
    outputs = tuple(
        Output(out.slot, tuple(t for t in out.terms if any(linear[n] for n in t.operands()))) for out in terms.outputs
    )
    return TermSet(terms.operands, outputs)


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "unweighted"])
@pytest.mark.parametrize("seed", SEEDS)
def test_transpose_of_random_terms(seed: int, weighted: bool) -> None:
    rng = np.random.default_rng(seed)
    terms = random_terms(seed, weighted)
    linear = linear_sets(terms, rng)
    terms = only_linear(terms, linear)
    operands = arrays(terms.operands)
    known = [v for v, is_linear in zip(operands, linear, strict=True) if not is_linear]

    def of_linear(*moving: jax.Array) -> Arrays:
        fixed, moved = iter(known), iter(moving)
        return evaluate(terms, [next(moved) if is_linear else next(fixed) for is_linear in linear])

    has_cotangent = (rng.random(len(terms.outputs)) < 0.7).tolist()
    cotangents = arrays(tuple(out.slot for out in terms.outputs), 3)
    full = [c if given else jnp.zeros_like(c) for c, given in zip(cotangents, has_cotangent, strict=True)]
    unknown = [v for v, is_linear in zip(operands, linear, strict=True) if is_linear]
    expected = list(jax.linear_transpose(of_linear, *unknown)(full))
    transposed = transpose(terms, linear, has_cotangent)
    given = [c for c, is_given in zip(cotangents, has_cotangent, strict=True) if is_given]
    assert [out.slot for out in transposed.outputs] == [
        slot for slot, is_linear in zip(terms.operands, linear, strict=True) if is_linear
    ]
    assert_equal(evaluate(transposed, known + given), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_prune_of_random_terms(seed: int) -> None:
    terms = random_terms(seed)
    used = (np.random.default_rng(seed).random(len(terms.outputs)) < 0.5).tolist()
    smaller, read = prune(terms, used)
    operands = arrays(terms.operands)
    expected = [v for v, is_used in zip(evaluate(terms, operands), used, strict=True) if is_used]
    assert_equal(evaluate(smaller, [v for v, is_read in zip(operands, read, strict=True) if is_read]), expected)
    assert {n for out in smaller.outputs for t in out.terms for n in t.operands()} == set(range(len(smaller.operands)))
    assert prune(smaller, [True] * len(smaller.outputs)) == (smaller, (True,) * len(smaller.operands))


def forward_mode(function: Callable, count: int) -> Callable:
    return lambda *v: jax.jvp(function, v[:count], v[count:])[1]


def reverse_mode(function: Callable, count: int) -> Callable:
    return lambda *v: list(jax.vjp(function, *v[:count])[1](list(v[count:])))


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "unweighted"])
@pytest.mark.parametrize("modes", ["ff", "fr", "rf", "rr", "fff", "rfr", "frr", "rrf", "rrr"])
def test_compositions_of_modes(modes: str, weighted: bool) -> None:
    terms = forward(weighted)
    function: Callable = lambda *v, terms=terms: evaluate(terms, list(v))  # noqa: E731
    for mode in modes:
        count = len(terms.operands)
        function = (forward_mode if mode == "f" else reverse_mode)(function, count)
        terms = jvp(terms, [True] * count)
        if mode == "r":
            terms = transpose(terms, [False] * count + [True] * count, [True] * len(terms.outputs))
    operands = arrays(terms.operands)
    assert_equal(evaluate(terms, operands), function(*operands))


def test_the_terms_of_force_training_are_the_fewest() -> None:
    # The kernels are planned for these: nothing twice, nothing that cancels, every operand read.
    def reverse(terms: TermSet) -> TermSet:
        count = len(terms.operands)
        pushed = jvp(terms, [True] * count)
        return transpose(pushed, [False] * count + [True] * count, [True] * len(terms.outputs))

    backward = reverse(forward(True))
    double = reverse(backward)
    assert repr(backward) == "<x0 y1 w2 z3 -> x: y1*w2*z3; y: x0*w2*z3; w: x0*y1*z3>"
    assert double.operands == ("x", "y", "w", "z", "x", "y", "w")
    assert [(out.slot, len(out.terms)) for out in double.outputs] == [("x", 2), ("y", 2), ("w", 2), ("z", 3)]
    for terms in (backward, double):
        assert all(prune(terms, [True] * len(terms.outputs))[1])
        assert all(len(set(out.terms)) == len(out.terms) for out in terms.outputs)


def test_equality_and_text() -> None:
    terms = forward(True)
    assert terms == forward(True) and hash(terms) == hash(forward(True)) and terms != forward(False)
    assert repr(terms) == "<x0 y1 w2 -> z: x0*y1*w2>"
    assert repr(jvp(terms, [True, False, False])) == "<x0 y1 w2 x3 -> z: x3*y1*w2>"
    assert repr(jvp(terms, [False] * 3)) == "<x0 y1 w2 -> z: 0>"
