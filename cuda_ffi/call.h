// What one custom call says about itself: the attributes of target `jaxcg_launch`, read and checked.
#ifndef JAXCG_CUDA_FFI_CALL_H_
#define JAXCG_CUDA_FFI_CALL_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jaxcg {

constexpr size_t kMaxLaunches = 512;
// The driver's limit for a kernel's parameters before CUDA 12.1; a call of ours uses a tenth of it.
constexpr size_t kMaxArgumentBytes = 4096;

// One kernel launch: a record of five in the attribute `launches`.
struct Launch {
  int64_t threads;
  int64_t dynamic_shared_bytes;
  int64_t max_blocks;  // 0: nothing to do, the launch is left out.
  bool persistent;     // At most one block a multiprocessor.
  bool early;          // Blocks may start before the launch before has ended: the kernel waits for it by itself.
};

// Views into the attributes; they live as long as the call frame that holds them.
struct Call {
  using Integers = ::xla::ffi::Span<const int64_t>;
  std::string_view digest;
  std::string_view images;
  Integers image_sizes{nullptr, 0};
  std::string_view names;
  Integers launches{nullptr, 0};
  Integers sizes{nullptr, 0};
  Integers zeroed{nullptr, 0};
  std::string_view problem;

  size_t num_launches() const { return launches.size() / 5; }
  Launch launch(size_t index) const;
};

// Reads every attribute with its type. Does not look at the values.
::xla::ffi::ErrorOr<Call> Read(const ::xla::ffi::Dictionary& attributes);

// What is wrong with the values of `call`, or an empty string.
std::string FindFault(const Call& call);

// The kernel names of `call`, one per launch.
std::vector<std::string> SplitNames(std::string_view names);

// The same text with the problem in front, so that a user knows which product it is about.
std::string Explain(const Call& call, const std::string& text);

}  // namespace jaxcg

#endif  // JAXCG_CUDA_FFI_CALL_H_
