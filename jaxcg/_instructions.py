"""Instructions of a product: the table of modes, validation, and the lists that the constructors build."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from e3nn_jax import Irrep, Irreps

from ._errors import InstructionError, IrrepsError, OptionError
from ._irreps import blocks, from_blocks, product

Instruction: TypeAlias = tuple[int, int, int, str, bool, float]
WeightOrder: TypeAlias = Literal["path", "slot"]
IrrepOrder: TypeAlias = Literal["jax", "torch"]


@dataclass(frozen=True)
class Mode:
    """How the multiplicities u, v, w of the two operands and the result are connected.

    Attributes:
        fits: whether multiplicities (mul1, mul2, mul_out) are allowed.
        rule: the same in words, for the error.
        weight_shape: shape of the weights of a path.
        summands: number of products that are summed into one element of the result.
    """

    fits: Callable[[int, int, int], bool]
    rule: str
    weight_shape: Callable[[int, int, int], tuple[int, ...]]
    summands: Callable[[int, int], int]


MODES: dict[str, Mode] = {
    "uvw": Mode(lambda u, v, w: True, "any multiplicities", lambda u, v, w: (u, v, w), lambda u, v: u * v),
    "uvu": Mode(lambda u, v, w: u == w, "mul_out == mul1", lambda u, v, w: (u, v), lambda u, v: v),
    "uvv": Mode(lambda u, v, w: v == w, "mul_out == mul2", lambda u, v, w: (u, v), lambda u, v: u),
    "uuw": Mode(lambda u, v, w: u == v, "mul1 == mul2", lambda u, v, w: (u, w), lambda u, v: u),
    "uuu": Mode(lambda u, v, w: u == v == w, "mul1 == mul2 == mul_out", lambda u, v, w: (u,), lambda u, v: 1),
    "uvuv": Mode(lambda u, v, w: u * v == w, "mul_out == mul1 * mul2", lambda u, v, w: (u, v), lambda u, v: 1),
}


def check_option(argument: str, value: object, allowed: Sequence[object]) -> None:
    """Raise unless `value` is one of `allowed`."""
    if value not in allowed:
        raise OptionError.of(argument, expected="one of " + ", ".join(map(repr, allowed)), received=repr(value))


def check_instructions(
    instructions: Iterable[Sequence[object]], in1: Irreps, in2: Irreps, out: Irreps
) -> tuple[Instruction, ...]:
    """Check a list of instructions against the irreps and make it a tuple of plain 6-tuples.

    Raises:
        InstructionError: an instruction has the wrong length, an index out of range, an unknown mode, multiplicities
            that its mode forbids, irreps that break the selection rule, a missing weight or a negative path weight.
    """
    checked: list[Instruction] = []
    if not isinstance(instructions, Iterable) or isinstance(instructions, str):
        raise InstructionError.of(
            "instructions", expected="a list of (i_in1, i_in2, i_out, mode, has_weight[, path_weight])",
            received=repr(instructions),
        )  # fmt: skip
    for number, raw in enumerate(instructions):
        if not isinstance(raw, Sequence) or isinstance(raw, str) or len(raw) not in (5, 6):
            raise InstructionError.of(
                f"instructions[{number}]",
                expected="(i_in1, i_in2, i_out, mode, has_weight[, path_weight])",
                received=repr(raw),
            )
        checked.append(_check_one(number, tuple(raw), in1, in2, out))
    return tuple(checked)


def _check_one(number: int, raw: tuple[object, ...], in1: Irreps, in2: Irreps, out: Irreps) -> Instruction:
    where = f"instructions[{number}]"
    indices: list[int] = []
    for name, index, irreps in zip(("i_in1", "i_in2", "i_out"), raw[:3], (in1, in2, out), strict=True):
        try:
            position = operator.index(index)  # pyright: ignore[reportArgumentType]
        except TypeError as error:
            raise InstructionError.of(f"{where}.{name}", expected="an integer", received=repr(index)) from error
        if not 0 <= position < len(irreps):
            raise InstructionError.of(
                f"{where}.{name}", expected=f"a block number in [0, {len(irreps)}) of {irreps}", received=position
            )
        indices.append(position)
    mode, has_weight = raw[3], raw[4]
    if not isinstance(mode, str) or mode not in MODES:
        raise InstructionError.of(f"{where}.mode", expected="one of " + ", ".join(MODES), received=repr(mode))
    if has_weight not in (True, False) or isinstance(has_weight, str):
        raise InstructionError.of(f"{where}.has_weight", expected="True or False", received=repr(has_weight))
    has_weight = bool(has_weight)
    try:
        path_weight = float(raw[5]) if len(raw) == 6 else 1.0  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise InstructionError.of(f"{where}.path_weight", expected="a number", received=repr(raw[5])) from error
    if not 0.0 <= path_weight < float("inf"):
        # The coefficient of a path is the square root of its weight.
        raise InstructionError.of(f"{where}.path_weight", expected="a finite number >= 0", received=path_weight)
    (mul1, ir1), (mul2, ir2), (mul_out, ir_out) = (
        blocks(irreps)[index] for irreps, index in zip((in1, in2, out), indices, strict=True)
    )
    if ir_out not in product(ir1, ir2):
        raise InstructionError.of(
            where,
            expected=f"an output irrep in {ir1} x {ir2} = {'+'.join(map(str, product(ir1, ir2)))}",
            received=str(ir_out),
        )
    if not MODES[mode].fits(mul1, mul2, mul_out):
        raise InstructionError.of(
            where,
            expected=f"{MODES[mode].rule} for mode {mode}",
            received=f"multiplicities {mul1}, {mul2} -> {mul_out}",
        )
    if not has_weight and mode == "uvw":
        raise InstructionError.of(
            where, expected="has_weight=True for mode uvw", received=False, fix="Use uvuv for an unweighted product."
        )
    if not has_weight and mode == "uuw" and mul_out not in (0, 1):
        raise InstructionError.of(
            where, expected="multiplicity 1 of the output for mode uuw without weights", received=mul_out
        )
    return (indices[0], indices[1], indices[2], mode, has_weight, path_weight)


def slot_order(slots: Sequence[tuple[int, Irrep]], irrep_order: IrrepOrder) -> list[int]:
    """Positions of output slots after a stable sort by irrep.

    e3nn-jax orders irreps 0e < 0o < 1o < 1e < 2e < 2o (the parity of the spherical harmonics first), torch e3nn
    0o < 0e < 1o < 1e < 2o < 2e (odd first).
    """
    check_option("irrep_order", irrep_order, ("jax", "torch"))

    def key(number: int) -> tuple[int, int]:
        ir = slots[number][1]
        return (ir.l, -ir.p * (-1) ** ir.l) if irrep_order == "jax" else (ir.l, ir.p)

    return sorted(range(len(slots)), key=key)


def private_slots(
    in1: Irreps,
    in2: Irreps,
    keep: frozenset[Irrep] | None,
    mode: str,
    has_weight: bool,
    *,
    weight_order: WeightOrder = "path",
    irrep_order: IrrepOrder = "jax",
    keep_empty: bool = False,
) -> tuple[Irreps, tuple[Instruction, ...]]:
    """Loop over blocks of both operands and output irreps; each path gets a slot of its own, slots sorted by irrep.

    Pairs with a zero multiplicity are left out unless `keep_empty`.
    """
    check_option("weight_order", weight_order, ("path", "slot"))
    slots: list[tuple[int, Irrep]] = []
    pairs: list[tuple[int, int]] = []
    for i1, (mul1, ir1) in enumerate(blocks(in1)):
        for i2, (mul2, ir2) in enumerate(blocks(in2)):
            if mul1 * mul2 == 0 and not keep_empty:
                continue
            for ir_out in product(ir1, ir2):
                if keep is None or ir_out in keep:
                    slots.append((mul1 if mode == "uvu" else mul1 * mul2, ir_out))
                    pairs.append((i1, i2))
    order = slot_order(slots, irrep_order)
    position = {number: slot for slot, number in enumerate(order)}
    instructions = [(*pairs[n], position[n], mode, has_weight, 1.0) for n in range(len(slots))]
    if weight_order == "slot":
        instructions.sort(key=lambda instruction: instruction[2])
    return from_blocks(slots[n] for n in order), tuple(instructions)


def aligned(irreps1: Irreps, irreps2: Irreps) -> tuple[Irreps, Irreps]:
    """Split the blocks of two irreps with the same number of channels, so that block by block multiplicities agree.

    >>> aligned(Irreps("2x0e+1o"), Irreps("1e+0o+0o"))
    (1x0e+1x0e+1x1o, 1x1e+1x0o+1x0o)
    """
    if irreps1.num_irreps != irreps2.num_irreps:
        raise IrrepsError.of(
            "irreps_in2",
            expected=f"as many channels as {irreps1}: {irreps1.num_irreps}",
            received=f"{irreps2.num_irreps} in {irreps2}",
        )
    # The same walk as e3nn's: the longer block is cut, also when the shorter has no channel at all, so that lists of
    # blocks (not only their contents) agree with e3nn's.
    left, right = blocks(irreps1), blocks(irreps2)
    position = 0
    while position < min(len(left), len(right)):
        (mul1, ir1), (mul2, ir2) = left[position], right[position]
        if mul1 < mul2:
            right[position : position + 1] = [(mul1, ir2), (mul2 - mul1, ir2)]
        elif mul2 < mul1:
            left[position : position + 1] = [(mul2, ir1), (mul1 - mul2, ir1)]
        position += 1
    # What is left on one side has no channel.
    return from_blocks(left[:position]), from_blocks(right[:position])


def elementwise_slots(
    in1: Irreps, in2: Irreps, keep: frozenset[Irrep] | None
) -> tuple[Irreps, tuple[Instruction, ...]]:
    """The product of aligned irreps, channel by channel; each path gets a slot of its own, in the order of blocks."""
    paths = [
        (block, mul, ir_out)
        for block, ((mul, ir1), (_, ir2)) in enumerate(zip(blocks(in1), blocks(in2), strict=True))
        for ir_out in product(ir1, ir2)
        if keep is None or ir_out in keep
    ]
    instructions = tuple((block, block, slot, "uuu", False, 1.0) for slot, (block, _, _) in enumerate(paths))
    return from_blocks((mul, ir_out) for _, mul, ir_out in paths), instructions
