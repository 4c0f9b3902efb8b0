"""Which products the generated kernels can run, with the reason in words."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._problem import TensorProduct


@dataclass(frozen=True)
class Support:
    """Whether generated kernels can run a product.

    Attributes:
        ok: whether they can.
        reason: why, or why not, in a sentence.
        swapped: they run it with the two operands exchanged (plain product only, not the convolution).
    """

    ok: bool
    reason: str
    swapped: bool = False


def path_obstacle(tp: "TensorProduct", number: int) -> str:
    """What keeps generated kernels from running an instruction; empty when nothing does."""
    mode = tp.instructions[number][3]
    mul1, mul2, _ = tp.multiplicities(number)
    if mode not in ("uvu", "uvv"):
        return f"mode {mode}"
    if mode == "uvu" and mul2 != 1:
        return f"multiplicity {mul2} in the second operand"
    if mode == "uvv" and mul1 != 1:
        return f"multiplicity {mul1} in the first operand"
    return ""


def kernel_support(tp: "TensorProduct") -> Support:
    """The answer of `TensorProduct.kernel_support`."""
    numbers = tp.active_instructions()
    if not numbers:
        return Support(True, "no path has a channel: the result is zero")
    for number in numbers:
        if obstacle := path_obstacle(tp, number):
            mode = tp.instructions[number][3]
            mode = "" if obstacle.startswith("mode") else f" (mode {mode})"
            return Support(
                False,
                f"instruction {number}{mode} has {obstacle}; generated kernels run uvu with multiplicity 1 in the "
                "second operand and uvv with multiplicity 1 in the first",
            )
    modes = {tp.instructions[n][3] for n in numbers}
    if modes == {"uvu"}:
        return Support(True, "every instruction is uvu with multiplicity 1 in the second operand")
    if modes == {"uvu", "uvv"}:
        return Support(False, "instructions mix modes uvu and uvv; generated kernels run one of them at a time")
    reason = "every instruction is uvv with multiplicity 1 in the first operand; plain product only"
    return Support(True, reason, swapped=True)
