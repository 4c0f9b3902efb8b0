"""What a legal program is, run after every lowering."""

from jaxcg.codegen.ir import SIGNATURES, Program


class IllegalProgramError(AssertionError):
    """The lowering made a program that breaks a rule: a fault of jaxcg, never of its user."""


def verify(program: Program, *, entries: int) -> Program:
    """Check a program: known operations, kinds, definition before use, no name twice, table bounds.

    Args:
        program: the program.
        entries: entries of M for each edge; loads must stay below.

    Returns:
        The program.

    Raises:
        IllegalProgramError: naming the operation and the rule.
    """
    outer = {value.name: value.kind for value in program.inputs}
    summed = {value.name for sums in program.y_sums for _, value in sums}
    for block in program.blocks:
        known = dict(outer)
        for op in block.ops:
            signature = SIGNATURES.get(op.code)
            if signature is None:
                raise IllegalProgramError(f"unknown operation {op.code}")
            if tuple(arg.kind for arg in op.args) != signature.args or len(op.at) != signature.places:
                raise IllegalProgramError(f"{op}: arguments must be {signature.args} at {signature.places} places")
            for arg in op.args:
                if known.get(arg.name) != arg.kind:
                    raise IllegalProgramError(f"{op}: {arg.name} is not defined here")
            if op.code == "load_m" and not 0 <= op.at[1] < entries:
                raise IllegalProgramError(f"{op}: M has {entries} entries")
            if (op.out is None) != (signature.out is None):
                raise IllegalProgramError(f"{op}: must define {signature.out}")
            if op.out is None:
                continue
            if op.out.kind != signature.out:
                raise IllegalProgramError(f"{op}: result must be {signature.out}")
            if signature.accumulates != (op.out.name in known):
                rule = "must exist" if signature.accumulates else "is defined twice"
                raise IllegalProgramError(f"{op}: {op.out.name} {rule}")
            known[op.out.name] = op.out.kind
    if missing := summed - outer.keys():
        raise IllegalProgramError(f"y sums {sorted(missing)} are not accumulators")
    return program
