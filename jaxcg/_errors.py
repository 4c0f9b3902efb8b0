"""Errors of the public face: each names the argument, what was expected, what came, and a fix."""

from typing import Self


class JaxcgError(ValueError):
    """Base of every error that jaxcg raises for a wrong argument or a missing part."""

    @classmethod
    def of(cls, argument: str, *, expected: str, received: object, fix: str = "") -> Self:
        """The error with its message in the house form.

        Args:
            argument: name of the argument (or part) at fault, as the caller wrote it.
            expected: what it must be.
            received: what it was.
            fix: what to do about it; empty when the expectation already says it.

        Returns:
            The error, to be raised.

        >>> print(JaxcgError.of("layout", expected="one of 'mul_ir', 'ir_mul'", received="'irmul'"))
        `layout` must be one of 'mul_ir', 'ir_mul', got 'irmul'
        """
        message = f"`{argument}` must be {expected}, got {received}"
        return cls(f"{message}; {fix}" if fix else message)


class ShapeError(JaxcgError):
    """An array has the wrong shape, or arrays of one call disagree in length."""


class DtypeError(JaxcgError):
    """An array has a dtype that jaxcg does not compute in."""


class IrrepsError(JaxcgError):
    """Irreps cannot be read, or do not fit the product."""


class InstructionError(JaxcgError):
    """An instruction of a product is malformed, breaks a selection rule, or its multiplicities do not fit its mode."""


class OptionError(JaxcgError):
    """A keyword has a value outside the allowed ones."""


class GraphError(JaxcgError):
    """Senders, receivers, an edge order or a number of nodes is not what the convolution needs."""


class UnsupportedError(JaxcgError):
    """The implementation that was asked for cannot run this product."""


class MissingLibraryError(JaxcgError, ImportError):
    """A library that the call needs is not installed or cannot be loaded."""
