"""Tests of the tests: kernels with one planted fault each, which the emulated comparison must notice.

Faults of synchronisation, of predicates and addresses are planted in the text; wrong arithmetic in the programs that
the text is printed from; missing and mixed-up terms in the term sets.
"""

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import pytest

from jaxcg._primitive import Call
from jaxcg._terms import Term, TermSet
from jaxcg.codegen import KernelSource, generate
from jaxcg.codegen.ir import SIGNATURES, Op, Program
from jaxcg.codegen.lower import LoweredRole, lower_role
from jaxcg.runtime import launch
from jaxcg.schedule import DeviceLimits, choose
from tests import emulator
from tests._cases import Case, term_sets
from tests.emulator.compiler import Sanitizer
from tests.kernels._check import check, image, source_of

# Tails, two blocks of x, unsorted edges of which some are absent, receivers without edges.
GRAPH = Case("faults", "5x0e+33x1o", "0e+1o", "0e+1o", nodes=70)
PLAIN = replace(GRAPH, indexed=False)
UNWEIGHTED = replace(GRAPH, weighted=False)
# One role: what stands in the text once is one fault.
ONE_ROLE = Case("faults-one-role", "70x1o", "1o", "0e+1e", nodes=70)


class NothingSpoiledError(Exception):
    """A fault could not be planted: the generator no longer writes what the test looks for."""


Make = Callable[[Call, TermSet, int, DeviceLimits], KernelSource]
real_source = launch.kernel_source


@contextlib.contextmanager
def kernels_by(make: Make, compile_source: Callable[[str], bytes]) -> Iterator[None]:
    """The primitive takes kernels that `make` makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "kernel_source", make)
        with emulator.emulated(compile_source):
            yield


def fault_found(case: Case, order: str, make: Make, sanitizer: Sanitizer | None = None, blocks: int = 3) -> str:
    """What the comparison, or a sanitizer with a number of blocks, says about spoiled kernels; empty if nothing."""
    compile_source = image if sanitizer is None else emulator.sanitized_image(sanitizer)
    with kernels_by(make, compile_source):
        try:
            check(case, order, "float32", () if sanitizer is None else [("forward", blocks)])
        except (AssertionError, jax.errors.JaxRuntimeError) as error:
            return str(error) or "wrong"
    return ""


@pytest.mark.parametrize("order", term_sets())
@pytest.mark.parametrize("case", [GRAPH, PLAIN, UNWEIGHTED, ONE_ROLE], ids=["graph", "rows", "unweighted", "one-role"])
def test_nothing_is_found_in_whole_kernels(case: Case, order: str) -> None:
    assert fault_found(case, order, real_source) == ""


TEXT_FAULTS = {
    "stored-past-the-tail": (
        replace(GRAPH, layout="ir_mul"), "forward", r"\(FULL \|\| 32 \* t < left\) p\[", "(FULL || 32 * t <= left) p[",
    ),
    "moved-past-the-tail": (GRAPH, "forward", r"(left \+ lane < \d+ \? )(?=left)", r"\1 1 + "),
    "copied-past-the-tail": (GRAPH, "backward", r" < room\b", " < 1 + room"),
    "added-past-the-tail": (
        replace(GRAPH, layout="ir_mul"), "backward", r"if \((\d+) < left\) add", r"if (\1 <= left) add",
    ),
    "gradient-of-x-past-the-tail": (
        replace(GRAPH, nodes=5), "backward", r"(left \+ lane < \d+ \? )(?=left)", r"\1 1 + ",
    ),
    "sender-off-by-one": (GRAPH, "forward", r"\bsender \* ", "(sender > 0 ? sender - 1 : sender) * "),
    "order-ignored": (
        GRAPH, "forward", r"\border\[([^\]]*)\]", r"(\1)",
    ),
    "empty-receivers-left": (GRAPH, "forward", r"n < receiver;", "false;"),
    "pieces-of-other-teams": (
        replace(GRAPH, graph="sorted", edges=700), "forward", r"if \(team < \d+ \|\| team >= \d+\) return;", "",
    ),
    "rows-outside-left": (replace(GRAPH, graph="star"), "forward", r"n < to;", "false;"),
    "cut-receivers-left": (GRAPH, "forward", r"add_pack\(sum, from\);", "(void)from;"),
    "cut-receivers-overwrite": (GRAPH, "double_backward", r"continued = first > 0", "continued = false && first > 0"),
    "absent-edges-count": (GRAPH, "forward", r"if \(is_absent\) \{", "if (false) {"),
    "absent-edges-have-gradients": (GRAPH, "backward", r"const bool present = [^;]*;", "const bool present = true;"),
    "gradients-of-x-overwrite": (
        GRAPH, "backward", r"add_atomically<W>\(global \+ k, q\.v\)", "*reinterpret_cast<Pack<T, W>*>(global + k) = q",
    ),
    "half-of-the-lanes-summed": (GRAPH, "backward", r"transpose_sum<(\d+), 16>", r"transpose_sum<\1, 8>"),
    "a-number-of-the-wrong-edge": (PLAIN, "forward", r"edge = base \+ b;", "edge = base;"),
    "channel-of-the-next-lane": (PLAIN, "double_backward", r"chunk \+ lane;", "chunk + (lane ^ 1);"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXT_FAULTS)
def test_faults_in_the_text(name: str) -> None:
    case, order, pattern, replacement = TEXT_FAULTS[name]

    def spoiled(*given) -> KernelSource:
        source = real_source(*given)
        text = re.sub(pattern, replacement, source.text)
        if text == source.text:
            raise NothingSpoiledError(pattern)
        return replace(source, text=text)

    # What is added past the tail is 0, so only the address is wrong.
    assert fault_found(case, order, spoiled, "address" if name == "gradient-of-x-past-the-tail" else None)


LAUNCH_FAULTS = {
    "not-zeroed": lambda source: replace(source, zeroed=()),
    "first-launch-missing": lambda source: replace(source, launches=source.launches[1:]),
    "last-launch-missing": lambda source: replace(source, launches=source.launches[:-1]),
    "launch-twice": lambda source: replace(source, launches=(source.launches[0], *source.launches)),
    "too-little-shared-memory": lambda source: replace(
        source, launches=tuple(replace(one, shared_bytes=max(0, one.shared_bytes - 16)) for one in source.launches)
    ),
}


@pytest.mark.parametrize("name", LAUNCH_FAULTS)
def test_faults_in_the_launches(name: str) -> None:
    def spoiled(*given) -> KernelSource:
        source = LAUNCH_FAULTS[name](real_source(*given))
        if source == real_source(*given):
            raise NothingSpoiledError(name)
        return source

    assert fault_found(GRAPH, "double_backward", spoiled)


SYNCHRONISATION = re.compile(r"^ *(\w+_barrier\([^)]*\);|__syncwarp\(\);|queue\.(wait<\d+>|commit)\(\);)", re.MULTILINE)


@pytest.mark.parametrize("order", ["forward", "gradient_y", "backward"])
@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
def test_every_barrier_and_wait_is_needed(layout: str, order: str) -> None:
    """Each is dropped in turn: the comparison or, at the latest, ThreadSanitizer must notice."""
    # Two batches for each piece of a single block. At the last edge one row ends and another begins.
    case = replace(ONE_ROLE, layout=layout, edges=240, graph="single")
    text = source_of(case, order, "float32").text
    places = [match.span(1) for match in SYNCHRONISATION.finditer(text, text.index("struct Args"))]
    dropped = {text[start:end] for start, end in places}
    # A gradient of y alone has no M, so no barrier for it either.
    assert len(places) >= (4 if order == "gradient_y" else 5) and any("wait" in name for name in dropped)
    assert (order == "gradient_y") != any("_barrier" in name for name in dropped)
    for start, end in places:
        line = text[text.rindex("\n", 0, start) + 1 : text.index("\n", end)].strip()

        def spoiled(*given, span: tuple[int, int] = (start, end)) -> KernelSource:
            source = real_source(*given)
            if source.text != text:
                raise NothingSpoiledError("this is the text of another call")
            return replace(source, text=text[: span[0]] + text[span[1] :])

        found = fault_found(case, order, spoiled) or fault_found(case, order, spoiled, "thread", blocks=1)
        assert found, f"nobody misses `{line}` at line {text.count(chr(10), 0, start) + 1}"


def spoil_program(edit: Callable[[Op], Op | None], code: str) -> Make:
    """Kernels in which the middle operation with this code, of all roles, is edited (None: left out)."""

    def make(call: Call, terms: TermSet, itemsize: int, limits: DeviceLimits) -> KernelSource:
        schedule = choose(call.coupling, terms, itemsize, limits, call.compensated)
        roles = [role for one in schedule.launches for role in one.roles]
        programs = [lower_role(call.coupling, terms, role, call.compensated).program for role in roles]
        found = [op for program in programs for op in program.ops() if op.code == code]
        if not found:
            raise NothingSpoiledError(f"no operation {code}")
        chosen = found[len(found) // 2]
        left = [1]

        def lower(*given) -> LoweredRole:
            lowered = lower_role(*given)
            blocks = []
            for block in lowered.program.blocks:
                ops: list[Op] = []
                for op in block.ops:
                    if op == chosen and left[0]:
                        left[0] = 0
                        ops += [new for new in [edit(op)] if new is not None]
                    else:
                        ops.append(op)
                blocks.append(replace(block, ops=tuple(ops)))
            program: Program = replace(lowered.program, blocks=tuple(blocks))
            return replace(lowered, program=program)

        with pytest.MonkeyPatch.context() as patch:
            # The package has a function of the module's name.
            patch.setattr(importlib.import_module("jaxcg.codegen.generate"), "lower_role", lower)
            source = generate(
                call.coupling, terms, schedule, indexed=call.indexed, ordered=call.ordered, itemsize=itemsize
            )
        if source.text == real_source(call, terms, itemsize, limits).text:
            raise NothingSpoiledError(f"operation {chosen} is not printed")
        return source

    return make


REMOVABLE = [code for code, signature in SIGNATURES.items() if signature.accumulates or signature.out is None]


@pytest.mark.parametrize("code", REMOVABLE)
def test_missing_operations(code: str) -> None:
    case = {"add": UNWEIGHTED, "add_compensated": replace(GRAPH, compensated=True)}.get(code, GRAPH)
    order = "forward" if case.compensated else "double_backward"
    assert fault_found(case, order, spoil_program(lambda op: None, code))


@pytest.mark.parametrize("code", ["scale", "fma_scalar", "axpy"])
def test_wrong_signs(code: str) -> None:
    assert fault_found(GRAPH, "double_backward", spoil_program(lambda op: replace(op, number=-op.number), code))


DOUBLE = term_sets()["double_backward"]
EACH_TERM = [(o, t) for o, output in enumerate(DOUBLE.outputs) for t in range(len(output.terms))]


def with_terms(terms: TermSet, output: int, new: tuple[Term, ...]) -> TermSet:
    """A term set with other terms in one output."""
    outputs = list(terms.outputs)
    outputs[output] = replace(outputs[output], terms=new)
    return replace(terms, outputs=tuple(outputs))


@pytest.mark.parametrize("output, number", EACH_TERM)
def test_missing_terms_of_the_double_backward(output: int, number: int) -> None:
    terms = DOUBLE.outputs[output].terms
    spoiled = with_terms(DOUBLE, output, terms[:number] + terms[number + 1 :])
    assert spoiled != DOUBLE
    small = replace(GRAPH, irreps_in1="3x0e+2x1o")
    found = fault_found(small, "double_backward", lambda call, _, *rest: real_source(call, spoiled, *rest))
    assert f"output {output}" in found


@pytest.mark.parametrize("output", range(len(DOUBLE.outputs)))
def test_mixed_up_operands_of_the_double_backward(output: int) -> None:
    """One term reads the other operand of a slot: the tangent for the value or the reverse."""
    first, *rest = DOUBLE.outputs[output].terms
    slot = next(slot for slot in "xyw" if first[slot] is not None)
    (other,) = (n for n, s in enumerate(DOUBLE.operands) if s == slot and n != first[slot])
    spoiled = with_terms(DOUBLE, output, (first.replace(**{slot: other}), *rest))
    small = replace(GRAPH, irreps_in1="3x0e+2x1o")
    found = fault_found(small, "double_backward", lambda call, _, *rest: real_source(call, spoiled, *rest))
    assert f"output {output}" in found
