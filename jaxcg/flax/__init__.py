"""Flax modules for the weighted product and the convolution: `jaxcg.flax.linen` and `jaxcg.flax.nnx`.

Both are loaded on first use. They need Flax: ``pip install jaxcg[flax]``.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from jaxcg._errors import MissingLibraryError

__all__ = ["linen", "nnx"]  # pyright: ignore[reportUnsupportedDunderAll]

if find_spec("flax") is None:
    raise MissingLibraryError.of(
        "flax", expected="installed for jaxcg.flax", received="no such package", fix="run: pip install 'jaxcg[flax]'"
    )


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
