"""Irreps of e3nn-jax with precise types: what jaxcg asks of them, read and built in one place."""

from collections.abc import Iterable
from typing import TypeAlias

from e3nn_jax import Irrep, Irreps, MulIrrep

from ._errors import IrrepsError

IrrepsLike: TypeAlias = Irreps | Irrep | str | Iterable[object]
Block: TypeAlias = tuple[int, Irrep]


def as_irreps(value: IrrepsLike, argument: str) -> Irreps:
    """Read irreps, with an error that names the argument."""
    if value is None:
        raise IrrepsError.of(argument, expected="irreps, such as '32x0e+32x1o'", received=None)
    try:
        return Irreps(value)  # pyright: ignore[reportArgumentType]
    except (ValueError, AssertionError, TypeError) as error:
        raise IrrepsError.of(
            argument, expected="irreps, such as '32x0e+32x1o'", received=repr(value), fix=f"e3nn says: {error}"
        ) from error


def blocks(irreps: Irreps) -> list[Block]:
    """The blocks as (multiplicity, irrep)."""
    return [(mul, ir) for mul, ir in irreps]  # pyright: ignore[reportUnknownVariableType]


def multiplicity(irreps: Irreps, number: int) -> int:
    """Multiplicity of one block."""
    return irreps[number].mul  # pyright: ignore[reportAttributeAccessIssue]


def from_blocks(parts: Iterable[Block]) -> Irreps:
    """Irreps with these blocks, as they are: empty ones kept, nothing sorted or merged."""
    return Irreps(list(parts))  # pyright: ignore[reportArgumentType]


def product(ir1: Irrep, ir2: Irrep) -> list[Irrep]:
    """The irreps in the product of two, in ascending degree."""
    parity = ir1.p * ir2.p
    return [Irrep(degree, parity) for degree in range(abs(ir1.l - ir2.l), ir1.l + ir2.l + 1)]


def as_filter(value: IrrepsLike | None) -> frozenset[Irrep] | None:
    """Read `filter_ir_out` in every form that e3nn accepts: None, a string, an irrep, irreps or a list of either."""
    if value is None:
        return None
    try:
        if isinstance(value, str):
            value = Irreps(value)
        if isinstance(value, Irrep | MulIrrep):
            value = [value]
        return frozenset(Irrep(ir) for ir in value)  # pyright: ignore[reportArgumentType]
    except (ValueError, AssertionError, TypeError) as error:
        raise IrrepsError.of(
            "filter_ir_out", expected="irreps to keep, such as '0e+1o'", received=repr(value), fix=str(error)
        ) from error
