// The few entry points of the CUDA driver that the handler needs, declared by hand so that building
// needs no CUDA toolkit, and found in libcuda.so.1 at the first use so that importing needs no driver.
// Names, types and values are those of the driver's stable binary interface (CUDA 12 and later).
#ifndef JAXCG_CUDA_FFI_DRIVER_H_
#define JAXCG_CUDA_FFI_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace jaxcg::driver {

using Result = int;
using Device = int;
using DevicePointer = unsigned long long;
using Library = struct LibraryHandle*;
using Kernel = struct KernelHandle*;
using Stream = struct StreamHandle*;

constexpr Result kSuccess = 0;
constexpr int kMultiprocessorCount = 16;      // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kComputeCapabilityMajor = 75;   // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kMaxSharedPerBlockOptIn = 97;   // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
constexpr int kFunctionSharedBytes = 1;       // CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
constexpr int kFunctionRegisters = 4;         // CU_FUNC_ATTRIBUTE_NUM_REGS
constexpr int kFunctionMaxDynamicShared = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

constexpr int kProgrammaticStreamSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    char bytes[64];
    int allowed;
  } value;
};

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned dynamic_shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

struct Api {
  Result (*cuGetErrorName)(Result error, const char** name);
  Result (*cuGetErrorString)(Result error, const char** text);
  Result (*cuCtxGetDevice)(Device* device);
  Result (*cuDeviceGetAttribute)(int* value, int attribute, Device device);
  Result (*cuLibraryLoadData)(Library* library, const void* code, int* jit_options, void** jit_values,
                              unsigned num_jit_options, int* library_options, void** library_values,
                              unsigned num_library_options);
  Result (*cuLibraryUnload)(Library library);
  Result (*cuLibraryGetKernel)(Kernel* kernel, Library library, const char* name);
  Result (*cuKernelGetAttribute)(int* value, int attribute, Kernel kernel, Device device);
  Result (*cuKernelSetAttribute)(int attribute, int value, Kernel kernel, Device device);
  // A CUkernel may stand where the driver asks for a CUfunction: it is resolved in the current context.
  Result (*cuOccupancyMaxActiveBlocksPerMultiprocessor)(int* blocks, Kernel kernel, int threads,
                                                        size_t dynamic_shared_bytes);
  Result (*cuMemsetD8Async)(DevicePointer destination, unsigned char value, size_t bytes, Stream stream);
  Result (*cuStreamIsCapturing)(Stream stream, int* status);  // 0: no.
  Result (*cuLaunchKernelEx)(const LaunchConfig* config, Kernel kernel, void** parameters, void** extra);
  // Null before CUDA 12.4.
  Result (*cuKernelGetParamInfo)(Kernel kernel, size_t index, size_t* offset, size_t* size);
};

// The driver's functions, or null with `problem` saying which file or symbol is missing and what to do.
// Opens libcuda.so.1 at the first call; later calls return the same answer. Thread-safe.
const Api* Get(std::string& problem);

// "cuLaunchKernel failed: CUDA_ERROR_X (N): text of the driver".
std::string Describe(const Api& api, const char* function, Result result);

}  // namespace jaxcg::driver

#endif  // JAXCG_CUDA_FFI_DRIVER_H_
