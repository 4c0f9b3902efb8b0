"""Clebsch-Gordan tensor products and equivariant convolutions for JAX, with generated CUDA kernels.

`TensorProduct` describes a product; calling it multiplies, `TensorProduct.convolve` multiplies on the edges of a
graph and sums at the receivers. `jaxcg.e3nn` and `jaxcg.flax` are front ends, loaded on first use.

Importing the package starts no backend, opens no library of CUDA and reads no file or environment variable.
"""

from importlib import import_module
from types import ModuleType

from jaxcg._errors import DtypeError as DtypeError
from jaxcg._errors import GraphError as GraphError
from jaxcg._errors import InstructionError as InstructionError
from jaxcg._errors import IrrepsError as IrrepsError
from jaxcg._errors import JaxcgError as JaxcgError
from jaxcg._errors import MissingLibraryError as MissingLibraryError
from jaxcg._errors import OptionError as OptionError
from jaxcg._errors import ShapeError as ShapeError
from jaxcg._errors import UnsupportedError as UnsupportedError
from jaxcg._operations import EdgeOrder as EdgeOrder
from jaxcg._operations import path_taken as path_taken
from jaxcg._operations import sort_edges as sort_edges
from jaxcg._problem import TensorProduct as TensorProduct
from jaxcg._support import Support as Support
from jaxcg.runtime import ffi as _ffi  # noqa: F401  (registers the custom call, so that exported programs find it)

__version__ = "0.1.0"

_FRONT_ENDS = ("e3nn", "flax")


def __getattr__(name: str) -> ModuleType:
    if name in _FRONT_ENDS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
