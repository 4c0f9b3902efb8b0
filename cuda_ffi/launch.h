// The three stages of target `jaxcg_launch`, as plain functions over the decoded call.
#ifndef JAXCG_CUDA_FFI_LAUNCH_H_
#define JAXCG_CUDA_FFI_LAUNCH_H_

#include "driver.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcg {

// Once per call site and compilation, without a stream: checks the attributes, loads the first image that
// fits the device and finds every kernel in it. The program is kept, by digest, as long as the process lives.
::xla::ffi::Error Instantiate(::xla::ffi::RemainingArgs, ::xla::ffi::RemainingRets, ::xla::ffi::Dictionary attributes);

// Before each execution: raises the kernels' shared-memory limit on the current device and asks how many
// blocks are resident at once. Does nothing after the first time on a device.
::xla::ffi::Error Initialize(::xla::ffi::RemainingArgs, ::xla::ffi::RemainingRets, ::xla::ffi::Dictionary attributes);

// Zero-fills the results that ask for it and launches the kernels, in order, on `stream`. Neither allocates
// nor waits, so it may run while a CUDA graph is captured.
::xla::ffi::Error Execute(driver::Stream stream, ::xla::ffi::RemainingArgs operands, ::xla::ffi::RemainingRets results,
                          ::xla::ffi::Dictionary attributes);

}  // namespace jaxcg

#endif  // JAXCG_CUDA_FFI_LAUNCH_H_
