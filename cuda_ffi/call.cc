#include "call.h"

namespace jaxcg {
namespace {

namespace ffi = ::xla::ffi;

constexpr int64_t kMaxThreads = 1024;
constexpr int64_t kMaxBlocks = 2147483647;  // gridDim.x of every device since compute capability 3.0.

template <typename T>
bool Get(const ffi::Dictionary& attributes, std::string_view name, const char* type, T& value, std::string& fault) {
  ffi::ErrorOr<T> found = attributes.get<T>(name);
  if (found.has_value()) {
    value = *found;
    return true;
  }
  fault = "jaxcg_launch: attribute `" + std::string(name) + "` must be " + type + ": " + found.error().message() +
          " (the program was lowered by another version of jaxcg?)";
  return false;
}

std::string Text(int64_t value) { return std::to_string(value); }

std::string FindLaunchFault(const Launch& launch, size_t index) {
  const std::string which = "launch " + std::to_string(index) + ": ";
  if (launch.threads < 1 || launch.threads > kMaxThreads) {
    return which + "threads must be in [1, 1024], got " + Text(launch.threads);
  }
  if (launch.dynamic_shared_bytes < 0 || launch.dynamic_shared_bytes > kMaxBlocks) {
    return which + "dynamic shared memory must be a number of bytes >= 0, got " + Text(launch.dynamic_shared_bytes);
  }
  if (launch.max_blocks < 0 || launch.max_blocks > kMaxBlocks) {
    return which + "max_blocks must be in [0, 2147483647], got " + Text(launch.max_blocks);
  }
  return "";
}

}  // namespace

Launch Call::launch(size_t index) const {
  const int64_t* record = launches.begin() + 5 * index;
  return Launch{record[0], record[1], record[2], record[3] != 0, record[4] != 0};
}

ffi::ErrorOr<Call> Read(const ffi::Dictionary& attributes) {
  Call call;
  std::string fault;
  const bool good = Get(attributes, "digest", "a string", call.digest, fault) &&
                    Get(attributes, "images", "a string of bytes", call.images, fault) &&
                    Get(attributes, "image_sizes", "an int64 array", call.image_sizes, fault) &&
                    Get(attributes, "names", "a string", call.names, fault) &&
                    Get(attributes, "launches", "an int64 array", call.launches, fault) &&
                    Get(attributes, "sizes", "an int64 array", call.sizes, fault) &&
                    Get(attributes, "zeroed", "an int64 array", call.zeroed, fault) &&
                    Get(attributes, "problem", "a string", call.problem, fault);
  if (!good) return ffi::Unexpected<ffi::Error>(ffi::Error::InvalidArgument(fault));
  return call;
}

std::vector<std::string> SplitNames(std::string_view names) {
  std::vector<std::string> result;
  while (!names.empty()) {
    const size_t end = names.find('\n');
    result.emplace_back(names.substr(0, end));
    names = end == std::string_view::npos ? std::string_view() : names.substr(end + 1);
  }
  return result;
}

std::string FindFault(const Call& call) {
  if (call.digest.size() != 64 || call.digest.find_first_not_of("0123456789abcdef") != std::string_view::npos) {
    return "digest must be 64 lower-case hexadecimal digits, got '" + std::string(call.digest) + "'";
  }
  if (call.image_sizes.size() == 0) return "image_sizes must name at least one image, got none";
  size_t left = call.images.size();
  for (int64_t size : call.image_sizes) {
    // Compared with what is left, so that no sum can overflow.
    if (size < 1 || static_cast<uint64_t>(size) > left) {
      return "image_sizes must be positive and add up to the " + std::to_string(call.images.size()) +
             " bytes of images, got a size of " + Text(size) + " with " + std::to_string(left) + " bytes left";
    }
    left -= static_cast<size_t>(size);
  }
  if (left != 0) {
    return "image_sizes must add up to the " + std::to_string(call.images.size()) + " bytes of images, " +
           std::to_string(left) + " bytes are left over";
  }
  if (call.launches.size() == 0 || call.launches.size() % 5 != 0) {
    return "launches must hold 5 integers per launch and at least one launch, got " +
           std::to_string(call.launches.size()) + " integers";
  }
  if (call.num_launches() > kMaxLaunches) {
    return "at most " + std::to_string(kMaxLaunches) + " launches fit in one call, got " +
           std::to_string(call.num_launches());
  }
  const std::vector<std::string> names = SplitNames(call.names);
  if (names.size() != call.num_launches()) {
    return "names must hold one kernel per launch: expected " + std::to_string(call.num_launches()) + ", got " +
           std::to_string(names.size());
  }
  for (size_t index = 0; index < names.size(); ++index) {
    if (names[index].empty()) return "launch " + std::to_string(index) + ": its kernel has an empty name";
    const int64_t persistent = call.launches[5 * index + 3];
    if (persistent != 0 && persistent != 1) {
      return "launch " + std::to_string(index) + ": persistent must be 0 or 1, got " + Text(persistent);
    }
    const int64_t early = call.launches[5 * index + 4];
    if (early != 0 && (early != 1 || index == 0)) {
      return "launch " + std::to_string(index) + ": early must be 0 or 1, and 0 for the first, got " + Text(early);
    }
    const std::string fault = FindLaunchFault(call.launch(index), index);
    if (!fault.empty()) return fault;
  }
  if (call.sizes.size() * sizeof(int64_t) > kMaxArgumentBytes) {
    return "sizes must fit a kernel's parameters (" + std::to_string(kMaxArgumentBytes) + " bytes), got " +
           std::to_string(call.sizes.size()) + " integers";
  }
  for (int64_t result : call.zeroed) {
    if (result < 0) return "zeroed must hold result numbers >= 0, got " + Text(result);
  }
  return "";
}

std::string Explain(const Call& call, const std::string& text) {
  return "jaxcg_launch (" + std::string(call.problem) + "): " + text;
}

}  // namespace jaxcg
