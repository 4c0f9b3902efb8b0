// The extension module jaxcg._cuda_ffi: handlers as capsules for jax.ffi.register_ffi_target.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <vector>

#include "call.h"
#include "driver.h"
#include "launch.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;
namespace ffi = ::xla::ffi;

namespace {

XLA_FFI_DEFINE_HANDLER(
    kInstantiate, jaxcg::Instantiate,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInstantiate>().RemainingArgs().RemainingRets().Attrs<ffi::Dictionary>());

XLA_FFI_DEFINE_HANDLER(
    kInitialize, jaxcg::Initialize,
    ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().RemainingArgs().RemainingRets().Attrs<ffi::Dictionary>());

XLA_FFI_DEFINE_HANDLER(kExecute, jaxcg::Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<jaxcg::driver::Stream>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs<ffi::Dictionary>(),
                       {ffi::Traits::kCmdBufferCompatible});

nb::capsule Wrap(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

std::string FindFault(const std::string& digest, const nb::bytes& images, std::vector<int64_t> image_sizes,
                      const std::string& names, std::vector<int64_t> launches, std::vector<int64_t> sizes,
                      std::vector<int64_t> zeroed) {
  const auto view = [](const std::vector<int64_t>& values) {
    return jaxcg::Call::Integers(values.data(), values.size());
  };
  jaxcg::Call call;
  call.digest = digest;
  call.images = std::string_view(images.c_str(), images.size());
  call.image_sizes = view(image_sizes);
  call.names = names;
  call.launches = view(launches);
  call.sizes = view(sizes);
  call.zeroed = view(zeroed);
  return jaxcg::FindFault(call);
}

std::string DriverProblem() {
  std::string problem;
  jaxcg::driver::Get(problem);
  return problem;
}

}  // namespace

NB_MODULE(_cuda_ffi, m) {
  m.doc() = "The CUDA handler of custom-call target jaxcg_launch.";
  m.attr("ffi_api_version") = std::to_string(XLA_FFI_API_MAJOR) + "." + std::to_string(XLA_FFI_API_MINOR);
  m.def(
      "handlers",
      [] {
        nb::dict stages;
        stages["instantiate"] = Wrap(kInstantiate);
        stages["initialize"] = Wrap(kInitialize);
        stages["execute"] = Wrap(kExecute);
        return stages;
      },
      "The handler's stages, as jax.ffi.register_ffi_target takes them.");
  m.def("find_fault", &FindFault, nb::arg("digest"), nb::arg("images"), nb::arg("image_sizes"), nb::arg("names"),
        nb::arg("launches"), nb::arg("sizes"), nb::arg("zeroed"),
        "What the handler would find wrong with these attributes; an empty string if nothing.");
  m.def("driver_problem", &DriverProblem,
        "Why the NVIDIA driver's library cannot be used; an empty string if it can. Opens it.");
}
