// The CUDA handler's own code over a driver that records its calls, bound as a CPU handler: what the handler does
// with a good call, a bad one and a failing driver can be seen without a GPU.
//
// An image is text: "sm:f,g" holds kernels f and g; one that does not begin with "sm:" is of another architecture.
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "driver.h"
#include "launch.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = ::xla::ffi;

namespace jaxcg::driver {
struct LibraryHandle {
  std::string kernels;
};
struct KernelHandle {
  std::string name;
  int max_dynamic_shared = 49152;
};
}  // namespace jaxcg::driver

namespace {

using jaxcg::driver::Kernel;
using jaxcg::driver::Library;
using jaxcg::driver::Result;

struct Mock {
  std::mutex mutex;
  std::string log;
  std::map<std::string, int> values;  // occupancy, multiprocessors, major, capturing, device, argument_bytes.
  std::string failing;                // Name of the function that fails.

  Result Record(const std::string& function, const std::string& line) {
    std::lock_guard lock(mutex);
    log += function + " " + line + "\n";
    return function == failing ? 719 : 0;
  }
  int Value(const char* name) {
    std::lock_guard lock(mutex);
    return values[name];
  }
};

Mock& mock() {
  static Mock* instance = new Mock;
  return *instance;
}

const jaxcg::driver::Api kApi = [] {
  jaxcg::driver::Api api;
  api.cuGetErrorName = [](Result result, const char** name) {
    *name = result == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR_MOCK";
    return 0;
  };
  api.cuGetErrorString = [](Result, const char** text) {
    *text = "told to fail";
    return 0;
  };
  api.cuCtxGetDevice = [](int* device) {
    *device = mock().Value("device");
    return 0;
  };
  api.cuDeviceGetAttribute = [](int* value, int attribute, int) {
    switch (attribute) {
      case jaxcg::driver::kMultiprocessorCount:
        *value = mock().Value("multiprocessors");
        break;
      case jaxcg::driver::kComputeCapabilityMajor:
        *value = mock().Value("major");
        break;
      default:
        *value = 232448;
    }
    return 0;
  };
  api.cuLibraryLoadData = [](Library* library, const void* code, int*, void**, unsigned, int*, void**, unsigned) {
    const std::string image = static_cast<const char*>(code);
    if (const Result result = mock().Record("cuLibraryLoadData", image)) return result;
    if (image.rfind("sm:", 0) != 0) return 209;
    *library = new jaxcg::driver::LibraryHandle{"," + image.substr(3) + ","};
    return 0;
  };
  api.cuLibraryUnload = [](Library library) {
    delete library;
    return mock().Record("cuLibraryUnload", "");
  };
  api.cuLibraryGetKernel = [](Kernel* kernel, Library library, const char* name) {
    if (library->kernels.find("," + std::string(name) + ",") == std::string::npos) return 500;
    *kernel = new jaxcg::driver::KernelHandle{name};
    return 0;
  };
  api.cuKernelGetAttribute = [](int* value, int attribute, Kernel kernel, int) {
    *value = attribute == jaxcg::driver::kFunctionMaxDynamicShared ? kernel->max_dynamic_shared : 77;
    return 0;
  };
  api.cuKernelSetAttribute = [](int, int value, Kernel kernel, int device) {
    kernel->max_dynamic_shared = value;
    return mock().Record("cuKernelSetAttribute",
                         kernel->name + " " + std::to_string(value) + " device " + std::to_string(device));
  };
  api.cuOccupancyMaxActiveBlocksPerMultiprocessor = [](int* blocks, Kernel kernel, int threads, size_t shared) {
    *blocks = mock().Value("occupancy");
    return mock().Record("cuOccupancy", kernel->name + " " + std::to_string(threads) + " " + std::to_string(shared));
  };
  api.cuMemsetD8Async = [](unsigned long long address, unsigned char value, size_t bytes,
                           jaxcg::driver::Stream stream) {
    std::memset(reinterpret_cast<void*>(address), value, bytes);
    return mock().Record("cuMemsetD8Async",
                         std::to_string(bytes) + " stream " + std::to_string(reinterpret_cast<size_t>(stream)));
  };
  api.cuStreamIsCapturing = [](jaxcg::driver::Stream, int* status) {
    *status = mock().Value("capturing");
    return 0;
  };
  api.cuLaunchKernelEx = [](const jaxcg::driver::LaunchConfig* config, Kernel kernel, void** parameters, void**) {
    const auto* words = static_cast<const unsigned long long*>(parameters[0]);
    if (kernel->name == "add_bytes") {
      // Args {source, destination, bytes}.
      auto* destination = reinterpret_cast<unsigned char*>(words[1]);
      const auto* source = reinterpret_cast<const unsigned char*>(words[0]);
      for (size_t index = 0; index < words[2]; ++index) destination[index] += source[index];
    }
    std::string text = kernel->name + " grid " + std::to_string(config->grid_x) + "x" + std::to_string(config->grid_y) +
                       "x" + std::to_string(config->grid_z) + " threads " + std::to_string(config->block_x) +
                       " shared " + std::to_string(config->dynamic_shared_bytes) + " stream " +
                       std::to_string(reinterpret_cast<size_t>(config->stream));
    if (config->num_attributes != 0) text += " attribute " + std::to_string(config->attributes[0].id);
    return mock().Record("cuLaunchKernelEx", text);
  };
  api.cuKernelGetParamInfo = [](Kernel, size_t, size_t* offset, size_t* size) {
    *offset = 0;
    *size = static_cast<size_t>(mock().Value("argument_bytes"));
    return 0;
  };
  return api;
}();

ffi::Error ExecuteOnStream7(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  return jaxcg::Execute(reinterpret_cast<jaxcg::driver::Stream>(7), operands, results, attributes);
}

}  // namespace

namespace jaxcg::driver {

const Api* Get(std::string&) { return &kApi; }

std::string Describe(const Api& api, const char* function, Result result) {
  const char* name = nullptr;
  api.cuGetErrorName(result, &name);
  return std::string(function) + " failed: " + name;
}

}  // namespace jaxcg::driver

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    mock_instantiate, jaxcg::Instantiate,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInstantiate>().RemainingArgs().RemainingRets().Attrs<ffi::Dictionary>());
// XLA runs no initialize stage on the CPU: the first execution does that work.
XLA_FFI_DEFINE_HANDLER_SYMBOL(mock_execute, ExecuteOnStream7,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs<ffi::Dictionary>());

extern "C" void mock_set(const char* name, int value) {
  std::lock_guard lock(mock().mutex);
  mock().values[name] = value;
}

extern "C" void mock_fail(const char* function) {
  std::lock_guard lock(mock().mutex);
  mock().failing = function;
}

// The calls since the last time, one a line.
extern "C" const char* mock_take_log() {
  static std::string taken;
  std::lock_guard lock(mock().mutex);
  taken = mock().log;
  mock().log.clear();
  return taken.c_str();
}
