"""From a product, a term set and a schedule to CUDA text. Imports neither JAX nor anything of CUDA."""

from jaxcg.codegen.generate import KernelLaunch, KernelSource, generate

__all__ = ["KernelLaunch", "KernelSource", "generate"]
