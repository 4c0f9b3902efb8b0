"""What a text depends on beside its schedule, and where things lie in memory."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from jaxcg._coupling import Coupling, Path
from jaxcg._terms import TermSet
from jaxcg.codegen.render import Number
from jaxcg.schedule import Role, is_packed


@dataclass(frozen=True)
class Problem:
    """A call, without its sizes.

    Attributes:
        coupling: the product.
        terms: what is computed.
        indexed: whether x and z rows go through senders and receivers.
        ordered: whether edges are read through an order.
        number: the dtype.
        shares: how many warps write a share of each y gradient.
    """

    coupling: Coupling
    terms: TermSet
    indexed: bool
    ordered: bool
    number: Number
    shares: int

    @property
    def num_indices(self) -> int:
        return (2 if self.indexed else 0) + (1 if self.ordered else 0)

    def operands(self, slot: str) -> tuple[int, ...]:
        """Numbers of the operands of a slot."""
        return tuple(n for n, found in enumerate(self.terms.operands) if found == slot)

    def outputs(self, slot: str) -> tuple[int, ...]:
        """Numbers of the outputs with a slot open."""
        return tuple(n for n, out in enumerate(self.terms.outputs) if out.slot == slot)

    @cached_property
    def has_scratch(self) -> bool:
        return self.indexed and bool(self.outputs("z"))

    def operand(self, n: int) -> str:
        """Pointer to operand n."""
        return f"static_cast<const T*>(args.buffers[{self.num_indices + n}])"

    def output(self, n: int) -> str:
        """Pointer to output n."""
        return f"static_cast<T*>(args.buffers[{self.num_indices + len(self.terms.operands) + n}])"

    def extra(self, n: int) -> str:
        """Pointer to the n-th buffer after the outputs: scratch rows, marks of continued receivers, shares."""
        return f"args.buffers[{self.num_indices + len(self.terms.operands) + len(self.terms.outputs) + n}]"

    @property
    def num_extras(self) -> int:
        """Buffers after the outputs."""
        return 2 * self.has_scratch + self.has_shares

    @property
    def has_shares(self) -> bool:
        """Whether y gradients are added up from shares."""
        return bool(self.outputs("y")) and self.shares > 1

    def share(self, number: str, edge: str) -> str:
        """Pointer to the row of an edge in a share of a y gradient."""
        width = self.coupling.dim_in2
        base = f"static_cast<T*>({self.extra(2 * self.has_scratch)})"
        return f"{base} + ({number} * args.sizes[0] + {edge}) * {width}ll"

    def declare_indices(self) -> list[str]:
        """Statements that name the index buffers `senders`, `receivers` and `order`."""
        names = [*(("senders", "receivers") if self.indexed else ()), *(("order",) if self.ordered else ())]
        return [
            f"const int* const {name} = static_cast<const int*>(args.buffers[{number}]);"
            for number, name in enumerate(names)
        ]

    def receiver(self, position: str) -> str:
        """Receiver of the edge at a position of the walk."""
        return f"receivers[{self.edge_at(position)}]"

    def edge_at(self, position: str) -> str:
        """Number of the edge at a position of the walk."""
        return f"order[{position}]" if self.ordered else position


@dataclass(frozen=True)
class RoleLayout:
    """How the lanes of a role reach blocks of x and z in global memory, and slices of them in shared memory.

    Lane `lane` of chunk `chunk` holds channels u + 32 t (strided) or u + t (packed), t < C.
    """

    problem: Problem
    role: Role
    paths: tuple[Path, ...]

    @property
    def channels(self) -> int:
        return self.role.channels

    @property
    def mul(self) -> int:
        return self.paths[0].mul1

    @property
    def slice(self) -> int:
        """Channels of a warp."""
        return 32 * self.role.channels

    @cached_property
    def packed(self) -> bool:
        """Whether a lane's channels are neighbours, so that one vector access moves them."""
        return is_packed(self.problem.coupling, self.role)

    @property
    def full(self) -> bool:
        """Whether all lanes of all chunks hold existing channels."""
        return self.mul % self.slice == 0

    def declare_types(self) -> list[str]:
        """Names of a role's types: its lanes, and how they reach global memory and their stages in shared memory.

        In shared memory lanes without channels hold zeros, so that it needs no predicate.
        """
        packed = _bool(self.packed)
        return [
            f"typedef Lanes<T, {self.channels}> V;",
            f"typedef Access<{packed}, {_bool(self.full)}, {self.channels}> Global;",
            f"typedef Access<{packed}, true, {self.channels}> Shared;",
        ]

    def first_channel(self) -> str:
        """Expression of u."""
        lane = f"{self.channels} * lane" if self.packed else "lane"
        return f"{self.slice} * chunk + {lane}"

    def move(
        self, verb: Literal["load", "store"], space: Literal["Global", "Shared"], base: str, names: list[str]
    ) -> list[str]:
        """Text that moves all components of a block between lane values and memory.

        Args:
            verb: which way.
            space: a row in global memory, or this warp's slice of the block in shared memory.
            base: pointer to the block, or to the slice.
            names: values of the components.
        """
        components, packed = len(names), self.packed
        if packed and self.problem.coupling.layout == "mul_ir":
            lane = f"u * {components}" if space == "Global" else f"{self.channels * components} * lane"
            return [f"{verb}_block({base} + {lane}, {', '.join(names)});"]
        lane = "u" if space == "Global" else f"{self.channels} * lane" if packed else "lane"
        if self.problem.coupling.layout == "ir_mul":
            distance = self.mul if space == "Global" else self.slice
            places, step = [f"{k * distance} + {lane}" for k in range(components)], 32
        else:
            places, step = [f"{k} + {lane} * {components}" for k in range(components)], 32 * components
        if verb == "load":
            moves = zip(names, places, strict=True)
            return [f"{name} = {space}::load({base} + {place}, {step}, left);" for name, place in moves]
        moves = zip(places, names, strict=True)
        return [f"{space}::store({base} + {place}, {step}, left, {name});" for place, name in moves]


def _bool(value: bool) -> str:
    return "true" if value else "false"


def indent(lines: list[str], depth: int = 1) -> list[str]:
    """Indent lines; preprocessor lines stay at the margin."""
    return [("  " * depth + line) if line and not line.startswith("#") else line for line in lines]
