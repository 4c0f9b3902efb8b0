"""Runs generated CUDA kernel text on the CPU, so that tests need no GPU. A test tool: the package never imports it.

Inside `emulated` the library's programs for the CPU take the kernels; `settings` chooses the order of threads and
blocks. `image` turns kernel text into what the CPU handler of ``jaxcg_launch`` runs, `call` runs it through that
handler, `run_standalone` in a process of its own under AddressSanitizer or ThreadSanitizer.
"""

from .compiler import BuildError, build, image, kernel_names, sanitized_image
from .handler import call, emulated, register, settings
from .standalone import Launch, StandaloneResult, run_standalone

__all__ = [
    "BuildError",
    "Launch",
    "StandaloneResult",
    "build",
    "call",
    "emulated",
    "image",
    "kernel_names",
    "register",
    "run_standalone",
    "sanitized_image",
    "settings",
]
