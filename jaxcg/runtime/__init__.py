"""From CUDA text to a launch: compiler, cache of compiled images, custom call."""

from jaxcg.runtime.cache import cache_directory as cache_directory
from jaxcg.runtime.cache import compile_cached as compile_cached
from jaxcg.runtime.cache import dump_directory as dump_directory
from jaxcg.runtime.ffi import TARGET as TARGET
from jaxcg.runtime.ffi import Launch as Launch
from jaxcg.runtime.ffi import call_attributes as call_attributes
from jaxcg.runtime.ffi import require_extension as require_extension
from jaxcg.runtime.nvrtc import EXPORT_TARGETS as EXPORT_TARGETS
from jaxcg.runtime.nvrtc import CompiledImage as CompiledImage
from jaxcg.runtime.nvrtc import CompileError as CompileError
from jaxcg.runtime.nvrtc import KernelReport as KernelReport
from jaxcg.runtime.nvrtc import targets as targets
