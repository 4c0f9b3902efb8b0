// Target `jaxcg_launch` for the CPU: the same attributes as the CUDA handler, read by the same code, but an image is
// the path of a shared object made from kernel text, or of a program where a sanitizer needs a process of its own.
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "call.h"
#include "scheduler.h"
#include "subprocess.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = ::xla::ffi;

struct Settings {
  int blocks = 3, order = 0;
  unsigned seed = 0;
  int seconds = 60;
};

// XLA may run calls of one program in several threads at once; the scheduler has one block at a time.
std::mutex one_at_a_time;
Settings settings;

// A copy of a buffer that ends where memory that nobody may touch begins, and starts where such memory ends if its
// size is a multiple of 4096. Ends are rounded up to 16 bytes, the alignment that vector accesses need.
class Fence {
 public:
  explicit Fence(size_t bytes) : bytes_(bytes) {
    const size_t used = (bytes + kPage - 1) / kPage * kPage;
    mapped_bytes_ = used + 2 * kGuard;
    mapped_ =
        static_cast<char*>(mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (mapped_ == MAP_FAILED) {
      mapped_ = nullptr;
      return;
    }
    mprotect(mapped_ + kGuard, used, PROT_READ | PROT_WRITE);
    memset(mapped_ + kGuard, kCanary, used);
    begin_ = mapped_ + kGuard + used - (bytes + 15) / 16 * 16;
  }
  Fence(const Fence&) = delete;
  ~Fence() {
    if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
  }

  char* begin() const { return begin_; }
  void forbid_stores() { mprotect(mapped_ + kGuard, mapped_bytes_ - 2 * kGuard, PROT_READ); }
  // Whether no byte beside the buffer, on its own pages, was written.
  bool is_whole() const {
    auto untouched = [](char byte) { return byte == kCanary; };
    return std::all_of(mapped_ + kGuard, begin_, untouched) &&
           std::all_of(begin_ + bytes_, mapped_ + mapped_bytes_ - kGuard, untouched);
  }

 private:
  static constexpr size_t kPage = 4096, kGuard = 1 << 20;
  static constexpr char kCanary = 0x5A;
  size_t bytes_, mapped_bytes_ = 0;
  char* mapped_ = nullptr;
  char* begin_ = nullptr;
};

// A shared object, or a program for `run_in_process`.
struct Image {
  std::string program;
  decltype(&jaxcg_host_launch) launch = nullptr;
  decltype(&jaxcg_host_has_kernel) has_kernel = nullptr;
};

// The first image that loads and has every kernel, as on the device; `fault` says why none does.
Image find_image(const jaxcg::Call& call, const std::vector<std::string>& names, std::string& fault) {
  static std::map<std::string, Image> loaded;
  size_t offset = 0;
  for (int64_t size : call.image_sizes) {
    const std::string path(call.images.substr(offset, static_cast<size_t>(size)));
    offset += static_cast<size_t>(size);
    if (path.size() < 3 || path.compare(path.size() - 3, 3, ".so") != 0) {
      Image program;
      program.program = path;
      return program;
    }
    Image& image = loaded[path];
    if (image.launch == nullptr) {
      void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) {
        fault += std::string(fault.empty() ? "" : "; ") + dlerror();
        continue;
      }
      image.launch = reinterpret_cast<decltype(image.launch)>(dlsym(library, "jaxcg_host_launch"));
      image.has_kernel = reinterpret_cast<decltype(image.has_kernel)>(dlsym(library, "jaxcg_host_has_kernel"));
    }
    auto missing = std::find_if(names.begin(), names.end(),
                                [&image](const std::string& name) { return !image.has_kernel(name.c_str()); });
    if (missing == names.end()) return image;
    fault += (fault.empty() ? "" : "; ") + path + " has no kernel '" + *missing + "'";
  }
  return Image();
}

ffi::Error launch(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  ffi::ErrorOr<jaxcg::Call> read = jaxcg::Read(attributes);
  if (read.has_error()) return read.error();
  const jaxcg::Call& call = *read;
  std::string fault = jaxcg::FindFault(call);
  for (int64_t zeroed : call.zeroed) {
    if (fault.empty() && zeroed >= static_cast<int64_t>(results.size())) {
      fault = "zeroed names result " + std::to_string(zeroed) + " of " + std::to_string(results.size());
    }
  }
  if (!fault.empty()) return ffi::Error::InvalidArgument(jaxcg::Explain(call, fault));

  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const std::vector<std::string> names = jaxcg::SplitNames(call.names);
  const Image image = find_image(call, names, fault);
  if (image.launch == nullptr && image.program.empty())
    return ffi::Error::InvalidArgument(jaxcg::Explain(call, "no image loads: " + fault));

  std::vector<std::unique_ptr<Fence>> fences;
  std::vector<host::Region> regions;
  std::vector<int64_t> arguments;
  auto add = [&](size_t bytes) {
    fences.push_back(std::make_unique<Fence>(bytes));
    regions.push_back({fences.back()->begin(), static_cast<long long>(bytes)});
    arguments.push_back(reinterpret_cast<int64_t>(fences.back()->begin()));
    return fences.back()->begin();
  };
  for (size_t index = 0; index < operands.size(); ++index) {
    const ffi::AnyBuffer buffer = *operands.get<ffi::AnyBuffer>(index);
    char* copy = add(buffer.size_bytes());
    if (copy == nullptr) return ffi::Error::Internal(jaxcg::Explain(call, "no memory for an operand"));
    if (buffer.size_bytes() != 0) memcpy(copy, buffer.untyped_data(), buffer.size_bytes());
    fences.back()->forbid_stores();
  }
  for (size_t index = 0; index < results.size(); ++index) {
    ffi::Result<ffi::AnyBuffer> buffer = *results.get<ffi::AnyBuffer>(index);
    char* copy = add(buffer->size_bytes());
    if (copy == nullptr) return ffi::Error::Internal(jaxcg::Explain(call, "no memory for a result"));
    // On a device the contents are arbitrary; not a number is the value most likely to be noticed.
    const bool zeroed = std::find(call.zeroed.begin(), call.zeroed.end(), index) != call.zeroed.end();
    memset(copy, zeroed ? 0 : 0xFF, buffer->size_bytes());
  }
  for (int64_t size : call.sizes) arguments.push_back(size);

  char error[4096] = "";
  std::vector<host::Launch> launches;
  for (size_t index = 0; index < names.size(); ++index) {
    const jaxcg::Launch asked = call.launch(index);
    host::Launch run{};
    run.kernel = names[index].c_str();
    run.arguments = arguments.data();
    run.argument_bytes = static_cast<long long>(arguments.size() * sizeof(arguments[0]));
    run.threads = asked.threads;
    run.shared_bytes = asked.dynamic_shared_bytes;
    run.blocks = asked.persistent ? std::min<int64_t>(asked.max_blocks, settings.blocks) : asked.max_blocks;
    run.order = settings.order;
    run.seed = settings.seed;
    run.seconds = settings.seconds;
    run.regions = regions.data();
    run.num_regions = static_cast<int>(regions.size());
    run.error = error;
    run.error_bytes = sizeof error;
    if (run.blocks > 0) launches.push_back(run);
  }
  if (!image.program.empty()) {
    const std::vector<long long> sizes(call.sizes.begin(), call.sizes.end());
    fault = run_in_process(image.program, launches, regions, operands.size(), sizes);
    if (!fault.empty()) return ffi::Error::Internal(jaxcg::Explain(call, fault));
    launches.clear();
  }
  for (const host::Launch& run : launches) {
    if (image.launch(&run) != 0) return ffi::Error::Internal(jaxcg::Explain(call, error));
    for (size_t buffer = operands.size(); buffer < fences.size(); ++buffer) {
      if (fences[buffer]->is_whole()) continue;
      return ffi::Error::Internal(jaxcg::Explain(call, "kernel '" + std::string(run.kernel) +
                                                           "': wrote beside buffer " + std::to_string(buffer) + " (" +
                                                           std::to_string(regions[buffer].bytes) + " bytes)"));
    }
  }
  for (size_t index = 0; index < results.size(); ++index) {
    ffi::Result<ffi::AnyBuffer> buffer = *results.get<ffi::AnyBuffer>(index);
    if (buffer->size_bytes() == 0) continue;
    memcpy(buffer->untyped_data(), fences[operands.size() + index]->begin(), buffer->size_bytes());
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxcg_launch_cpu, launch, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

// Stays until the next call; the launch that runs now, if any, keeps what it began with.
extern "C" void jaxcg_configure(int blocks, int order, unsigned seed, int seconds) {
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  settings = Settings{blocks, order, seed, seconds};
}
