"""The code generator by itself: rules of its programs, its numbers, its fixed text, golden texts."""

import ast
import difflib
import hashlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import jaxcg
from jaxcg._coupling import couple
from jaxcg.codegen import KernelSource
from jaxcg.codegen.generate import prelude
from jaxcg.codegen.ir import LANES, SCALAR, SIGNATURES, Block, Builder, Op, Program, Value
from jaxcg.codegen.lower import lower_role
from jaxcg.codegen.render import Number
from jaxcg.codegen.verify import IllegalProgramError, verify
from jaxcg.runtime import launch, nvrtc
from jaxcg.schedule import SHARE, DeviceLimits, Group, Role, choose
from jaxcg.schedule.choose import shared_out
from jaxcg.schedule.cost import RoleCost
from tests import emulator
from tests._cases import CASES, Case, make_call, other_term_sets, term_sets
from tests.kernels._check import source_of

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
SMALL = Case("small", "5x0e+33x1o", "0e+1o", "0e+1o")


# --- what a legal program is


def legal() -> Program:
    """A program that uses every kind of operation."""
    x, z, acc, gy = Value("x", LANES), Value("z", LANES), Value("acc", LANES), Value("gy", SCALAR)
    builder = Builder()
    with builder.block("path 0"):
        w = builder.define("w", "load_w", at=(2, 0))
        m = builder.define("m", "load_m", at=(1, 3))
        scaled = builder.define("s", "multiply", w, x)
        builder.emit("fma_scalar", acc, m, scaled)
        total = builder.define("t", "zero_scalar")
        builder.emit("dot", total, scaled, z)
        builder.emit("axpy", gy, total, number=0.5)
        gradient = builder.define("g", "zero_lanes")
        contracted = builder.define("h", "scale", m, z)
        builder.emit("fma", gradient, x, contracted)
        builder.emit("add", gradient, contracted)
        builder.emit("store_w", None, gradient, at=(0, 0))
    return Program((x, z, acc, gy), tuple(builder.blocks), (((0, gy),),))


def test_the_legal_program_is_accepted() -> None:
    assert verify(legal(), entries=4) == legal()


X, S = Value("x", LANES), Value("new", SCALAR)
ILLEGAL: dict[str, tuple[Op, str]] = {
    "unknown-operation": (Op("divide", S, (X,)), "unknown operation divide"),
    "too-few-arguments": (Op("multiply", Value("new", LANES), (X,)), "arguments must be"),
    "argument-of-another-kind": (Op("scale", Value("new", LANES), (X, X)), "arguments must be"),
    "no-place": (Op("load_m", S), "arguments must be"),
    "not-defined": (Op("dot", Value("gy", SCALAR), (X, Value("later", LANES))), "later is not defined here"),
    "defined-in-another-block": (Op("add", X, (Value("s_2", LANES),)), "s_2 is not defined here"),
    "defined-as-another-kind": (Op("axpy", Value("gy", SCALAR), (Value("x", SCALAR),)), "x is not defined here"),
    "entry-past-the-table": (Op("load_m", S, at=(1, 4)), "M has 4 entries"),
    "entry-before-the-table": (Op("load_m", S, at=(1, -1)), "M has 4 entries"),
    "store-that-defines": (Op("store_w", S, (X,), (0, 0)), "must define None"),
    "load-that-defines-nothing": (Op("load_m", None, at=(1, 0)), "must define scalar"),
    "result-of-another-kind": (Op("load_m", Value("new", LANES), at=(1, 0)), "result must be scalar"),
    "defined-twice": (Op("zero_lanes", X), "x is defined twice"),
    "added-to-nothing": (Op("axpy", Value("new", SCALAR), (Value("gy", SCALAR),)), "new must exist"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_operations_are_refused(name: str) -> None:
    op, reason = ILLEGAL[name]
    program = legal()
    spoiled = replace(program, blocks=(*program.blocks, Block("path 1", (op,))))
    with pytest.raises(IllegalProgramError, match=re.escape(reason)):
        verify(spoiled, entries=4)


def test_sums_must_be_accumulators() -> None:
    with pytest.raises(IllegalProgramError, match=r"\['lost'\] are not accumulators"):
        verify(replace(legal(), y_sums=(((0, Value("lost", SCALAR)),),)), entries=4)


def test_every_program_of_the_table_is_legal_and_every_operation_is_used() -> None:
    used = set()
    for case in CASES:
        coupling = make_call(case).coupling
        for terms in (term_sets(case.weighted) | other_term_sets(case.weighted)).values():
            for one in choose(coupling, terms, 8, DeviceLimits(), case.compensated).launches:
                for role in one.roles:
                    lowered = lower_role(coupling, terms, role, case.compensated)
                    verify(lowered.program, entries=len(lowered.entries))
                    used |= {op.code for op in lowered.program.ops()}
    assert used == set(SIGNATURES), f"never used: {set(SIGNATURES) - used}"


# --- numbers


@pytest.mark.parametrize("itemsize, dtype", [(4, np.float32), (8, np.float64)])
def test_literals_read_back(itemsize: int, dtype: type) -> None:
    number = Number(itemsize)
    rng = np.random.default_rng(0)
    values = [0.0, 1.0, -1.0, 3.0, 1e20, 1e-20, 0.1, 1 / 3, math.sqrt(2), -math.pi, 2.0**-126, 1e100, 2.0**24 + 1]
    values += list(rng.standard_normal(200)) + list(np.exp(40 * rng.standard_normal(100)))
    for value in values:
        if abs(value) > 1e38 and itemsize == 4:
            continue
        text = number.literal(float(value))
        assert text.endswith("f") == (itemsize == 4)
        assert re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?f?", text) and re.search(r"[.e]", text), text
        assert dtype(float(text.rstrip("f"))) == dtype(value)


def test_coefficients_are_exact_in_the_text() -> None:
    """Every coefficient of float64 is printed with all digits, none without a suffix in float32."""
    single, double = (source_of(SMALL, "double_backward", dtype).text for dtype in ("float32", "float64"))
    body = lambda text: text[text.index("struct Args") :]  # noqa: E731
    decimal = r"(?<![\w.])\d+\.\d+(?:e[+-]?\d+)?"
    assert re.findall(decimal + r"(?![\df])", body(single)) == []
    assert re.findall(decimal + "f", body(double)) == []
    printed = {float(value) for value in re.findall(decimal, body(double))}
    wanted = {abs(value) for path in make_call(SMALL).coupling.paths for *_, value in path.entries}
    assert wanted <= printed


# --- the text as a whole


def source(
    tp: jaxcg.TensorProduct,
    *,
    order: str = "backward",
    itemsize: int = 4,
    limits: DeviceLimits | None = None,
    **changes,
) -> KernelSource:
    call = replace(make_call(SMALL), product=tp, **changes)
    return launch.kernel_source(call, term_sets()[order], itemsize, limits or DeviceLimits())


def test_generation_is_deterministic_between_processes() -> None:
    """No set or dictionary order, and no address, reaches the text."""
    code = (
        "from tests.kernels._check import source_of\nfrom tests.kernels.test_codegen import SMALL\n"
        "print(*(source_of(SMALL, order, 'float32').digest for order in ('forward', 'backward', 'double_backward')))"
    )
    here = [source_of(SMALL, order, "float32").digest for order in term_sets()]
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert run.stdout.split() == here, run.stderr


def test_digest_is_that_of_the_text_and_changes_with_all_it_depends_on() -> None:
    tp = SMALL.product
    found = source(tp)
    assert found.digest == hashlib.sha256(found.text.encode()).hexdigest()
    others = [
        source(jaxcg.TensorProduct.channelwise("5x0e+33x1o", "0e+1o", "0e+1o", layout="ir_mul")),
        source(jaxcg.TensorProduct.channelwise("5x0e+34x1o", "0e+1o", "0e+1o")),
        source(jaxcg.TensorProduct.channelwise("5x0e+33x1o", "0e+1o", "0e+1o", irrep_normalization="norm")),
        source(tp, itemsize=8),
        source(tp, order="forward"),
        source(tp, ordered=False),
        source(tp, indexed=False, ordered=False),
    ]
    assert len({found.digest, *(other.digest for other in others)}) == 1 + len(others)
    # Sizes are arguments: a larger graph runs the same text.
    assert source(tp, num_rows=10**6, num_x=10**5, num_z=10**5).digest == found.digest


def test_the_text_says_what_it_is() -> None:
    text = source_of(SMALL, "double_backward", "float32").text
    assert text.startswith("// Generated by jaxcg. Do not edit.")
    for path in make_call(SMALL).coupling.paths:
        comment = f"path {path.index}: l = {path.l1} x {path.l2} -> {path.l3}, {path.mul1} channels"
        assert text.count(comment) >= 1
    assert repr(term_sets()["double_backward"]) in text


def test_names_of_kernels_are_those_of_the_launches() -> None:
    for order in term_sets():
        found = source_of(SMALL, order, "float32")
        assert emulator.kernel_names(found.text) == [one.name for one in found.launches]


# --- the fixed code


def test_prelude_compiles_alone() -> None:
    entry = "struct Args { void* buffers[1]; long long sizes[1]; };\n"
    entry += 'extern "C" __global__ void nothing(const Args args) { (void)args; }\n'
    emulator.build(prelude() + entry)
    for target in nvrtc.EXPORT_TARGETS:
        image = nvrtc.compile_source(prelude() + entry, target)
        assert [report.name for report in image.reports] == ["nothing"]


# --- what may import what


def imports(path: Path) -> set[str]:
    """Modules named in import statements anywhere in a file, also under `if` and in functions."""
    found: set[str] = set()
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) + "." if node.level else ""
            found |= {f"{start}{node.module or ''}", *(f"{start}{node.module or ''}.{a.name}" for a in node.names)}
    return found


def under(names: set[str], *roots: str) -> set[str]:
    return {name for name in names for root in roots if name == root or name.startswith(root + ".")}


RULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "schedule-knows-no-text": ("schedule", ("jaxcg.codegen", "jaxcg.runtime", "jax", "jaxlib")),
    "codegen-knows-no-jax": ("codegen", ("jaxcg.runtime", "jaxcg._primitive", "jaxcg._operations", "jax", "jaxlib")),
}


@pytest.mark.parametrize("rule", RULES)
def test_imports(rule: str) -> None:
    folder, forbidden = RULES[rule]
    files = sorted((ROOT / "jaxcg" / folder).glob("**/*.py"))
    assert files
    for file in files:
        assert not under(imports(file), *forbidden), file
    outside = [*(ROOT / "jaxcg").glob("**/*.py")]
    assert not [file for file in outside if under(imports(file), "tests")]


def test_terms_know_nothing() -> None:
    assert not under(imports(ROOT / "jaxcg" / "_terms.py"), "jax", "jaxcg", "numpy", "e3nn_jax")


# --- golden texts

ONE_PATH: Callable[..., Case] = lambda **changes: replace(Case("one-path", "40x1o", "1o", "0e"), **changes)  # noqa: E731
TEXTS = {
    "forward-graph": (ONE_PATH(), "forward", "float32"),
    "forward-rows-f64": (ONE_PATH(indexed=False), "forward", "float64"),
    "backward-graph-ir_mul": (ONE_PATH(layout="ir_mul", irreps_in1="64x1o", graph="sorted"), "backward", "float32"),
    "gradient-y-two-roles": (Case("two", "5x0e+33x1o", "0e+1o", "0e"), "gradient_y", "float32"),
    "double-backward-rows": (ONE_PATH(indexed=False), "double_backward", "float32"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_golden_texts(name: str, request: pytest.FixtureRequest) -> None:
    """The text of small kernels, without the fixed code: a change of the generator shows what it changes."""
    text = source_of(*TEXTS[name]).text
    text = text.replace(prelude(), "// (fixed code)\n")
    file = GOLDEN / f"{name}.cu"
    if request.config.getoption("update_golden"):
        file.write_text(text)
    golden = file.read_text()
    difference = "".join(difflib.unified_diff(golden.splitlines(True), text.splitlines(True), "golden", "now"))
    assert not difference, f"{difference}\nif this is right, run with --update-golden"


def test_no_golden_text_is_left_over() -> None:
    assert {file.stem for file in GOLDEN.glob("*.cu")} == set(TEXTS)


def test_an_x_block_of_very_many_paths_has_a_schedule() -> None:
    coupling = couple(jaxcg.TensorProduct.channelwise("1x0e", "+".join(["1o"] * 700)))
    schedule = choose(coupling, term_sets()["forward"], 4)
    done = [p for launch in schedule.launches for role in launch.roles for p in role.paths]
    assert sorted(done) == list(range(700))


@pytest.mark.parametrize("shared", [48, 99, 227])
def test_schedules_give_all_work_to_teams_that_exist(shared: int) -> None:
    """Every path for every channel, once; the roles of a group divide its teams without gap or overlap."""
    limits = DeviceLimits(shared_bytes=1024 * shared, shared_total=1024 * (shared + 1))
    for case in CASES:
        coupling = make_call(case).coupling
        for terms in term_sets(case.weighted).values():
            for itemsize in (4, 8):
                done: dict[int, list[tuple[int, int]]] = {}
                for one in choose(coupling, terms, itemsize, limits).launches:
                    assert 32 * one.warps <= 1024
                    assert sum(group.teams for group in one.groups if group.chunks > 1) <= 15  # named barriers
                    for group in one.groups:
                        ends = [0, *(role.end for role in group.roles)]
                        assert [role.start for role in group.roles] == ends[:-1] and ends[-1] == SHARE * group.teams
                        for role in group.roles:
                            assert role.chunks == group.chunks and role.start < role.end
                            assert 0 <= role.first_team and role.first_team + role.pieces <= group.teams
                            start = 32 * role.channels * role.chunk_start
                            for p in role.paths:
                                channels = (start, start + 32 * role.channels * role.chunks)
                                done.setdefault(p, []).append(channels)
                assert sorted(done) == list(range(len(coupling.paths)))
                for p, ranges in done.items():
                    starts, ends = zip(*sorted(ranges), strict=True)
                    assert [0, *ends[:-1]] == list(starts) and ends[-1] >= coupling.paths[p].mul1, (case.name, p)


def test_a_role_with_little_to_do_keeps_a_team() -> None:
    """Even one of a thousandth of the work, last beside others that fill the only team."""
    cost = lambda slots: RoleCost(100, slots, slots, slots, 0, 0, 0, 1)  # noqa: E731
    roles = tuple(Role((n,), 1, 0, 1, cost(slots)) for n, slots in enumerate((400_000, 10, 1_000_000, 10)))
    shared = shared_out(Group(roles, 1))
    assert [role.pieces for role in shared.roles] == [1, 1, 1, 1] and shared.roles[-1].end == SHARE
    assert all(role.first_team == 0 and role.start < role.end for role in shared.roles)


def test_fewer_channels_a_lane_where_more_do_not_fit() -> None:
    """4 channels a lane of 49 components of x and of its tangent would need more shared memory than a block has."""
    coupling = couple(jaxcg.TensorProduct.channelwise("4x24e", "0e"))
    schedule = choose(coupling, term_sets()["double_backward"], 4, DeviceLimits())
    assert [role.channels for one in schedule.launches for role in one.roles] == [1]
