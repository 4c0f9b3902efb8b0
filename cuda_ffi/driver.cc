#include "driver.h"

#include <dlfcn.h>

namespace jaxcg::driver {
namespace {

struct Loaded {
  Api api{};
  std::string problem;
};

template <typename Function>
void Find(void* library, const char* name, Function*& function, std::string& problem) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr && problem.empty()) {
    problem = std::string("libcuda.so.1 has no function ") + name +
              ": jaxcg needs an NVIDIA driver of CUDA 12 or later (the one in use is older)";
  }
}

Loaded Load() {
  Loaded loaded;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    loaded.problem = std::string("the NVIDIA driver's libcuda.so.1 cannot be opened (") +
                     (reason == nullptr ? "no reason given" : reason) +
                     "): install the driver, or put the folder that holds it on LD_LIBRARY_PATH";
    return loaded;
  }
  Api& api = loaded.api;
  std::string& problem = loaded.problem;
  Find(library, "cuGetErrorName", api.cuGetErrorName, problem);
  Find(library, "cuGetErrorString", api.cuGetErrorString, problem);
  Find(library, "cuCtxGetDevice", api.cuCtxGetDevice, problem);
  Find(library, "cuDeviceGetAttribute", api.cuDeviceGetAttribute, problem);
  Find(library, "cuLibraryLoadData", api.cuLibraryLoadData, problem);
  Find(library, "cuLibraryUnload", api.cuLibraryUnload, problem);
  Find(library, "cuLibraryGetKernel", api.cuLibraryGetKernel, problem);
  Find(library, "cuKernelGetAttribute", api.cuKernelGetAttribute, problem);
  Find(library, "cuKernelSetAttribute", api.cuKernelSetAttribute, problem);
  Find(library, "cuOccupancyMaxActiveBlocksPerMultiprocessor", api.cuOccupancyMaxActiveBlocksPerMultiprocessor,
       problem);
  Find(library, "cuMemsetD8Async", api.cuMemsetD8Async, problem);
  Find(library, "cuStreamIsCapturing", api.cuStreamIsCapturing, problem);
  Find(library, "cuLaunchKernelEx", api.cuLaunchKernelEx, problem);
  std::string optional;
  Find(library, "cuKernelGetParamInfo", api.cuKernelGetParamInfo, optional);
  return loaded;
}

}  // namespace

const Api* Get(std::string& problem) {
  // Never closed: a driver that is in use must stay mapped until the process ends.
  static const Loaded* loaded = new Loaded(Load());
  if (!loaded->problem.empty()) {
    problem = loaded->problem;
    return nullptr;
  }
  return &loaded->api;
}

std::string Describe(const Api& api, const char* function, Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (api.cuGetErrorName(result, &name) != kSuccess || name == nullptr) name = "unknown error";
  if (api.cuGetErrorString(result, &text) != kSuccess || text == nullptr) text = "no text";
  return std::string(function) + " failed: " + name + " (" + std::to_string(result) + "): " + text;
}

}  // namespace jaxcg::driver
