"""Sets of terms of the one multilinear form, and the two rewrites that differentiate them.

Every operation of the library is a partial evaluation of one form with four slots,

    F(x, y, w, z) = sum_paths sum_u w[p,u] sum_ijk C^p_ijk x[i,u] y[j] z[k,u],

with one slot left open. A `TermSet` says which operands fill which slots, and which slot each output leaves
open. Since F is linear in every slot, the derivative of a term set, in either mode and at any order, is again a
term set (Bharadwaj et al., arXiv:2501.13986, on double backward passes): `jvp` and `transpose` are the whole
calculus of the library.

The module knows nothing of JAX, irreps or CUDA.
"""

from collections.abc import Sequence
from dataclasses import dataclass

SLOTS = ("x", "y", "w", "z")


@dataclass(frozen=True, order=True)
class Term:
    """One evaluation of the form: the operand number that fills each slot.

    The open slot holds None, and so does `w` in a product without weights.
    """

    x: int | None
    y: int | None
    w: int | None
    z: int | None

    def __getitem__(self, slot: str) -> int | None:
        return getattr(self, slot)

    def operands(self) -> tuple[int, ...]:
        """Numbers of the operands that the term reads, in slot order."""
        return tuple(o for o in (self.x, self.y, self.w, self.z) if o is not None)

    def replace(self, **fills: int | None) -> "Term":
        """The same term with some slots filled otherwise."""
        return Term(**({"x": self.x, "y": self.y, "w": self.w, "z": self.z} | fills))


@dataclass(frozen=True)
class Output:
    """A sum of terms that leave the same slot open."""

    slot: str
    terms: tuple[Term, ...]


@dataclass(frozen=True)
class TermSet:
    """What one call computes: the slot of each operand, and the outputs.

    Attributes:
        operands: the slot that each operand belongs to.
        outputs: the outputs, each a sum of terms over these operands.
    """

    operands: tuple[str, ...]
    outputs: tuple[Output, ...]

    def __repr__(self) -> str:
        # Shown in every jaxpr equation, so short: "x0 y1 w2 -> z: x0*y1*w2".
        name = [f"{slot}{n}" for n, slot in enumerate(self.operands)]
        outs = [
            f"{out.slot}: " + (" + ".join("*".join(name[o] for o in t.operands()) for t in out.terms) or "0")
            for out in self.outputs
        ]
        return f"<{' '.join(name)} -> {'; '.join(outs)}>"


def forward(weighted: bool) -> TermSet:
    """The product itself: operands x, y (and w), output z."""
    operands = ("x", "y", "w") if weighted else ("x", "y")
    return TermSet(operands, (Output("z", (Term(0, 1, 2 if weighted else None, None),)),))


def jvp(terms: TermSet, has_tangent: Sequence[bool]) -> TermSet:
    """Forward-mode derivative.

    Args:
        terms: the term set to differentiate.
        has_tangent: for each operand, whether it has a non-zero tangent.

    Returns:
        A term set over the operands of `terms` followed by the tangents, one for each True in order. Its outputs
        are the tangents of the outputs: each term once for every operand of it that moves, with that operand
        replaced by its tangent (product rule). Outputs that do not move have no terms.
    """
    moved = [n for n, moves in enumerate(has_tangent) if moves]
    tangent_of = {n: len(terms.operands) + m for m, n in enumerate(moved)}
    outputs = tuple(
        Output(
            out.slot,
            tuple(
                term.replace(**{slot: tangent_of[number]})
                for term in out.terms
                for slot in SLOTS
                if (number := term[slot]) is not None and number in tangent_of
            ),
        )
        for out in terms.outputs
    )
    return TermSet(terms.operands + tuple(terms.operands[n] for n in moved), outputs)


def transpose(terms: TermSet, linear: Sequence[bool], has_cotangent: Sequence[bool]) -> TermSet:
    """Reverse-mode derivative of a term set that is linear in some operands jointly.

    Args:
        terms: the term set; each term must hold exactly one of the linear operands.
        linear: for each operand, whether the map is transposed with respect to it.
        has_cotangent: for each output, whether a cotangent is given.

    Returns:
        A term set over the operands that are not linear followed by the given cotangents. It has one output for
        each linear operand: in each term that holds it, the slot of the operand opens and the cotangent moves
        into the slot that was open.
    """
    kept = [n for n, is_linear in enumerate(linear) if not is_linear]
    renumber: dict[int | None, int | None] = {n: m for m, n in enumerate(kept)}
    renumber[None] = None
    cotangent_of = {}
    for n, given in enumerate(has_cotangent):
        if given:
            cotangent_of[n] = len(kept) + len(cotangent_of)
    gathered: dict[int, list[Term]] = {n: [] for n, is_linear in enumerate(linear) if is_linear}
    for n, out in enumerate(terms.outputs):
        if n not in cotangent_of:
            continue
        for term in out.terms:
            (target,) = (number for number in term.operands() if number in gathered)
            fills = {slot: renumber[term[slot]] for slot in SLOTS if term[slot] != target}
            fills[terms.operands[target]] = None
            fills[out.slot] = cotangent_of[n]
            gathered[target].append(Term(**fills))
    operands = tuple(terms.operands[n] for n in kept) + tuple(terms.outputs[n].slot for n in cotangent_of)
    outputs = tuple(Output(terms.operands[n], tuple(found)) for n, found in gathered.items())
    return TermSet(operands, outputs)


def prune(terms: TermSet, used_outputs: Sequence[bool]) -> tuple[TermSet, tuple[bool, ...]]:
    """Drop outputs that nobody asks for, then operands that no term reads.

    Returns:
        The smaller term set, and for each operand of `terms` whether it is still read.
    """
    outputs = [out for out, used in zip(terms.outputs, used_outputs, strict=True) if used]
    read = {number for out in outputs for term in out.terms for number in term.operands()}
    kept = [n for n in range(len(terms.operands)) if n in read]
    renumber: dict[int | None, int | None] = {n: m for m, n in enumerate(kept)}
    renumber[None] = None
    outputs = [
        Output(out.slot, tuple(Term(*(renumber[t[slot]] for slot in SLOTS)) for t in out.terms)) for out in outputs
    ]
    return (
        TermSet(tuple(terms.operands[n] for n in kept), tuple(outputs)),
        tuple(n in read for n in range(len(terms.operands))),
    )


def orders(weighted: bool) -> dict[str, TermSet]:
    """The product, its backward pass, and the backward pass of that, each with all its outputs.

    >>> orders(True)["backward"]
    <x0 y1 w2 z3 -> x: y1*w2*z3; y: x0*w2*z3; w: x0*y1*z3>
    """
    found = {"forward": forward(weighted)}
    for order, before in (("backward", "forward"), ("double_backward", "backward")):
        terms = found[before]
        count = len(terms.operands)
        pushed = jvp(terms, [True] * count)
        pulled = transpose(pushed, [False] * count + [True] * count, [True] * len(terms.outputs))
        found[order] = prune(pulled, [True] * count)[0]
    return found


def exchange(terms: TermSet) -> TermSet:
    """Terms that leave x open, as terms of the form with x and z exchanged: they leave z open.

    >>> exchange(TermSet(("y", "w", "z"), (Output("x", (Term(None, 0, 1, 2),)),)))
    <y0 w1 x2 -> z: x2*y0*w1>
    """
    assert all(out.slot == "x" for out in terms.outputs)
    operands = tuple("x" if slot == "z" else slot for slot in terms.operands)
    turned = tuple(Output("z", tuple(Term(t.z, t.y, t.w, None) for t in out.terms)) for out in terms.outputs)
    return TermSet(operands, turned)
