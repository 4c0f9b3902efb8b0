"""Print programs as CUDA C++: one statement an operation, one comment a path."""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from jaxcg.codegen.ir import SCALAR, Op, Program, Value
from jaxcg.codegen.lower import LoweredRole


@dataclass(frozen=True)
class Number:
    """How numbers of one dtype are printed.

    Attributes:
        itemsize: bytes.
    """

    itemsize: int

    @property
    def name(self) -> str:
        return "float" if self.itemsize == 4 else "double"

    def literal(self, value: float) -> str:
        """A literal that reads back as the nearest number of the dtype: 9 or 17 digits, `f` for float only."""
        if self.itemsize == 4:
            (value,) = struct.unpack("f", struct.pack("f", value))  # rounded once, not to 9 digits and then again
        text = f"{value:.9g}" if self.itemsize == 4 else f"{value:.17g}"
        if "." not in text and "e" not in text:
            text += ".0"
        return text + ("f" if self.itemsize == 4 else "")


@dataclass(frozen=True)
class Addresses:
    """Where a program reads and writes.

    Attributes:
        w: (operand, path number) -> expression of the weights of this lane.
        m: y operand -> pointer to the M row of the edge.
        gw: (output, path number, value) -> statement that stores a gradient of the weights.
    """

    w: Callable[[int, int], str]
    m: Callable[[int], str]
    gw: Callable[[int, int, str], str]


def _declaration(value: Value) -> str:
    return f"{'T' if value.kind == SCALAR else 'V'} {value.name}"


def render_program(role: LoweredRole, program: Program, number: Number, at: Addresses) -> list[str]:
    """The statements of one edge."""
    channels = role.role.channels
    lines: list[str] = []
    for block in program.blocks:
        lines.append(f"{{  // {block.comment}")
        loaded: set[tuple[int, int]] = set()
        for op in block.ops:
            lines += ["  " + line for line in _statements(op, channels, number, at, loaded)]
        lines.append("}")
    return lines


def _statements(op: Op, channels: int, number: Number, at: Addresses, loaded: set[tuple[int, int]]) -> list[str]:
    args = [arg.name for arg in op.args]
    out = op.out.name if op.out is not None else ""
    lanes = f"<T, {channels}>"
    sign = "-" if op.number < 0 else ""
    match op.code:
        case "load_w":
            operand, path = op.at
            return [f"const V {out} = {at.w(operand, path)};"]
        case "load_m":
            operand, entry = op.at
            quad = entry // 4
            lines = []
            if (operand, quad) not in loaded:
                loaded.add((operand, quad))
                lines.append(f"const Quad<T> q{operand}_{quad} = load_quad({at.m(operand)} + {4 * quad});")
            return [*lines, f"const T {out} = q{operand}_{quad}.v[{entry % 4}];"]
        case "zero_lanes":
            return [f"V {out} = zeros{lanes}();"]
        case "zero_scalar":
            return [f"T {out} = T(0);"]
        case "multiply":
            return [f"V {out} = mul({args[0]}, {args[1]});"]
        case "scale":
            return [f"V {out} = zeros{lanes}();", f"fma({out}, {sign}{args[0]}, {args[1]});"]
        case "add":
            return [f"add({out}, {args[0]});"]
        case "add_compensated":
            return [f"add_compensated({out}, {args[0]}, {args[1]});"]
        case "fma":
            return [f"fma({out}, {args[0]}, {args[1]});"]
        case "fma_scalar":
            return [f"fma({out}, {sign}{args[0]}, {args[1]});"]
        case "dot":
            return [f"dot({out}, {args[0]}, {args[1]});"]
        case "axpy":
            return [f"{out} += {number.literal(op.number)} * {args[0]};"]
        case "store_w":
            output, path = op.at
            return [f"{at.gw(output, path, args[0])};"]
    raise AssertionError(f"no text for operation {op.code}")


def declare(values: list[Value], channels: int, zero: bool) -> list[str]:
    """Declarations of values that live across blocks."""
    lines = []
    for value in values:
        start = ""
        if zero:
            start = " = T(0)" if value.kind == SCALAR else f" = zeros<T, {channels}>()"
        lines.append(f"{_declaration(value)}{start};")
    return lines


def render_combination(column: tuple[tuple[int, float], ...], number: Number, name: Callable[[int], str]) -> str:
    """A linear combination of named components."""
    return " + ".join(f"{number.literal(value)} * {name(j)}" for j, value in column)
