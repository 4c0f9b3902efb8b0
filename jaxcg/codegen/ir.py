"""The straight-line work of one warp on one edge, as a small typed program.

Values are either *lanes* (C channels held by each lane) or *scalars* (one number a lane). An `Op` defines one value
or adds to an accumulator. The lowering builds programs, `verify` checks them, `render` prints them, and the counts
of the cost model can be read off them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LANES = "lanes"
SCALAR = "scalar"


@dataclass(frozen=True)
class Value:
    """A named value of a program."""

    name: str
    kind: str


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        code: what it does, one of `SIGNATURES`.
        out: the value that it defines, or the accumulator that it adds to; None for stores.
        args: values that it reads.
        at: numbers that say where: operand, component, path...
        number: a constant factor, or a sign.
    """

    code: str
    out: Value | None
    args: tuple[Value, ...] = ()
    at: tuple[int, ...] = ()
    number: float = 1.0


@dataclass(frozen=True)
class Signature:
    """Types of an operation: kinds of arguments, kind of result, whether the result must exist already."""

    args: tuple[str, ...]
    out: str | None
    accumulates: bool = False
    places: int = 0


SIGNATURES = {
    # load_w at (operand, path); load_m at (y operand, entry)
    "load_w": Signature((), LANES, places=2),
    "load_m": Signature((), SCALAR, places=2),
    "zero_lanes": Signature((), LANES),
    "zero_scalar": Signature((), SCALAR),
    "multiply": Signature((LANES, LANES), LANES),
    "scale": Signature((SCALAR, LANES), LANES),
    "add": Signature((LANES,), LANES, accumulates=True),
    "fma": Signature((LANES, LANES), LANES, accumulates=True),
    "fma_scalar": Signature((SCALAR, LANES), LANES, accumulates=True),
    # (what is added, what rounding has taken from the sum so far). The second is an accumulator as well, and written.
    "add_compensated": Signature((LANES, LANES), LANES, accumulates=True),
    "dot": Signature((LANES, LANES), SCALAR, accumulates=True),
    "axpy": Signature((SCALAR,), SCALAR, accumulates=True),
    # store_w at (output, path)
    "store_w": Signature((LANES,), None, places=2),
}


@dataclass(frozen=True)
class Block:
    """A run of operations whose values are not used after it, under one comment."""

    comment: str
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Program:
    """The work on one edge.

    Attributes:
        inputs: values that live across edges: accumulators and operands of the current receiver.
        blocks: the operations.
        y_sums: for each y output, the scalar of each y component: summed over lanes after the blocks.
    """

    inputs: tuple[Value, ...]
    blocks: tuple[Block, ...]
    y_sums: tuple[tuple[tuple[int, Value], ...], ...] = ()

    def ops(self) -> Iterator[Op]:
        for block in self.blocks:
            yield from block.ops


@dataclass
class Builder:
    """Collects operations; makes each shared factor once within a block."""

    prefix: str = ""
    blocks: list[Block] = field(default_factory=list)
    _ops: list[Op] = field(default_factory=list)
    _count: int = 0

    @contextmanager
    def block(self, comment: str) -> Iterator[None]:
        """Open a block; operations emitted inside belong to it."""
        self._ops = []
        yield
        self.blocks.append(Block(comment, tuple(self._ops)))
        self._ops = []

    def define(self, stem: str, code: str, *args: Value, at: tuple[int, ...] = (), number: float = 1.0) -> Value:
        """Emit an operation that defines a new value."""
        kind = SIGNATURES[code].out
        assert kind is not None
        value = Value(f"{stem}_{self._count}", kind)
        self._count += 1
        self._ops.append(Op(code, value, args, at, number))
        return value

    def emit(self, code: str, out: Value | None, *args: Value, at: tuple[int, ...] = (), number: float = 1.0) -> None:
        """Emit an operation that adds to an accumulator or stores."""
        self._ops.append(Op(code, out, args, at, number))
