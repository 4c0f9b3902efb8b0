#include "launch.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "call.h"

namespace jaxcg {
namespace {

namespace ffi = ::xla::ffi;

// What one launch may do on one device, found out once by `Prepare`.
struct Prepared {
  driver::Device device;
  size_t index;  // Which kernel of the program.
  int64_t threads;
  int64_t dynamic_shared_bytes;
  int64_t multiprocessors;
  bool starts_early;  // Whether the device lets a launch start before the one before it has ended.
};

// A loaded image. The library does not belong to a context, so one serves every device of its architecture.
struct Program {
  std::string images;
  std::string names;
  driver::Library code = nullptr;
  std::vector<driver::Kernel> kernels;  // One per launch.
  std::vector<size_t> argument_bytes;   // Per kernel; 0 where the driver cannot tell.
  std::vector<Prepared> prepared;       // Few (launches x devices): searched in order. Guarded by Table::mutex.

  const Prepared* Find(driver::Device device, size_t index, const Launch& launch) const {
    for (const Prepared& one : prepared) {
      if (one.device == device && one.index == index && one.threads == launch.threads &&
          one.dynamic_shared_bytes == launch.dynamic_shared_bytes) {
        return &one;
      }
    }
    return nullptr;
  }
};

// All programs of this process. Never emptied: a captured graph may launch a kernel at any later time.
struct Table {
  std::shared_mutex mutex;
  std::map<std::string, std::unique_ptr<Program>, std::less<>> programs;

  static Table& Get() {
    static Table* table = new Table;  // Not destroyed: device threads may outlive static destruction.
    return *table;
  }

  // Null if no image of this digest was loaded. A program is never removed, so the pointer stays good.
  Program* Find(std::string_view digest) {
    std::shared_lock lock(mutex);
    auto found = programs.find(digest);
    return found == programs.end() ? nullptr : found->second.get();
  }
};

ffi::Error Invalid(const Call& call, const std::string& text) {
  return ffi::Error::InvalidArgument(Explain(call, text));
}

ffi::Error Failure(const Call& call, const std::string& text) { return ffi::Error::Internal(Explain(call, text)); }

ffi::Error NoDriver(const Call& call, const std::string& text) {
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, Explain(call, text));
}

// Empty if the image loads and holds every kernel of the program; otherwise why not.
std::string LoadImage(const driver::Api& api, std::string_view image, Program& program) {
  driver::Result result = api.cuLibraryLoadData(&program.code, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (result != driver::kSuccess) return driver::Describe(api, "cuLibraryLoadData", result);
  program.kernels.clear();
  program.argument_bytes.clear();
  for (const std::string& name : SplitNames(program.names)) {
    driver::Kernel kernel = nullptr;
    // Loading is lazy: an image of another architecture may show only here.
    result = api.cuLibraryGetKernel(&kernel, program.code, name.c_str());
    if (result != driver::kSuccess) {
      const std::string text = "kernel " + name + ": " + driver::Describe(api, "cuLibraryGetKernel", result);
      api.cuLibraryUnload(program.code);
      return text;
    }
    size_t offset = 0;
    size_t bytes = 0;
    if (api.cuKernelGetParamInfo == nullptr ||
        api.cuKernelGetParamInfo(kernel, 0, &offset, &bytes) != driver::kSuccess) {
      bytes = 0;
    }
    program.kernels.push_back(kernel);
    program.argument_bytes.push_back(bytes);
  }
  return "";
}

ffi::Error LoadProgram(const driver::Api& api, const Call& call, Program& program) {
  program.images = std::string(call.images);
  program.names = std::string(call.names);
  std::string reasons;
  size_t offset = 0;
  for (size_t index = 0; index < call.image_sizes.size(); ++index) {
    const size_t size = static_cast<size_t>(call.image_sizes[index]);
    // A copy ends in a zero byte, which the driver needs to find the end of PTX.
    const std::string image = program.images.substr(offset, size);
    const std::string reason = LoadImage(api, image, program);
    if (reason.empty()) return ffi::Error::Success();
    reasons += (reasons.empty() ? "" : "; ");
    reasons += "image " + std::to_string(index + 1) + " of " + std::to_string(call.image_sizes.size()) + ": " + reason;
    offset += size;
  }
  return Invalid(call,
                 "no image of this program runs on this device (lower it again on this machine, or export it "
                 "for this GPU's architecture). " +
                     reasons);
}

std::string Resources(const driver::Api& api, const Program& program, driver::Device device, size_t index,
                      const Launch& launch) {
  int registers = -1;
  int fixed_shared = -1;
  int limit = -1;
  api.cuKernelGetAttribute(&registers, driver::kFunctionRegisters, program.kernels[index], device);
  api.cuKernelGetAttribute(&fixed_shared, driver::kFunctionSharedBytes, program.kernels[index], device);
  api.cuDeviceGetAttribute(&limit, driver::kMaxSharedPerBlockOptIn, device);
  return "kernel " + SplitNames(program.names)[index] + " (" + std::to_string(launch.threads) + " threads of " +
         std::to_string(registers) + " registers, " + std::to_string(launch.dynamic_shared_bytes) + " dynamic and " +
         std::to_string(fixed_shared) + " static bytes of shared memory; device " + std::to_string(device) +
         " allows " + std::to_string(limit) + " bytes a block)";
}

// Makes launch `index` ready on `device`, which must be that of the current context.
ffi::Error Prepare(const driver::Api& api, const Call& call, Program& program, driver::Device device, size_t index) {
  const Launch launch = call.launch(index);
  const driver::Kernel kernel = program.kernels[index];
  const auto fail = [&](const char* function, driver::Result result) {
    return Failure(call,
                   Resources(api, program, device, index, launch) + ": " + driver::Describe(api, function, result));
  };
  std::unique_lock lock(Table::Get().mutex);
  if (program.Find(device, index, launch) != nullptr) return ffi::Error::Success();
  int limit = 0;
  driver::Result result = api.cuKernelGetAttribute(&limit, driver::kFunctionMaxDynamicShared, kernel, device);
  if (result != driver::kSuccess) return fail("cuKernelGetAttribute", result);
  if (launch.dynamic_shared_bytes > limit) {
    // Only ever raised: another call site may launch the same kernel with more.
    result = api.cuKernelSetAttribute(driver::kFunctionMaxDynamicShared, static_cast<int>(launch.dynamic_shared_bytes),
                                      kernel, device);
    if (result != driver::kSuccess) return fail("cuKernelSetAttribute", result);
  }
  int blocks = 0;
  result = api.cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, static_cast<int>(launch.threads),
                                                           static_cast<size_t>(launch.dynamic_shared_bytes));
  if (result != driver::kSuccess) return fail("cuOccupancyMaxActiveBlocksPerMultiprocessor", result);
  if (blocks == 0) {
    return Failure(call, Resources(api, program, device, index, launch) + ": not one block fits a multiprocessor");
  }
  int multiprocessors = 0;
  result = api.cuDeviceGetAttribute(&multiprocessors, driver::kMultiprocessorCount, device);
  if (result != driver::kSuccess) return fail("cuDeviceGetAttribute", result);
  int major = 0;
  result = api.cuDeviceGetAttribute(&major, driver::kComputeCapabilityMajor, device);
  if (result != driver::kSuccess) return fail("cuDeviceGetAttribute", result);
  program.prepared.push_back(
      Prepared{device, index, launch.threads, launch.dynamic_shared_bytes, multiprocessors, major >= 9});
  return ffi::Error::Success();
}

// How a launch goes on the current device.
struct Grid {
  int64_t blocks;
  bool early;
};
using Grids = std::array<Grid, kMaxLaunches>;

// Grid of each launch on the current device, preparing what was not prepared before.
ffi::Error FindGrids(const driver::Api& api, const Call& call, Program& program, Grids& grids) {
  driver::Device device = 0;
  const driver::Result result = api.cuCtxGetDevice(&device);
  if (result != driver::kSuccess) return Failure(call, driver::Describe(api, "cuCtxGetDevice", result));
  // The second round runs only the first time on a device.
  for (int round = 0; round < 2; ++round) {
    size_t missing = kMaxLaunches;
    {
      std::shared_lock lock(Table::Get().mutex);
      for (size_t index = 0; index < call.num_launches(); ++index) {
        const Launch launch = call.launch(index);
        grids[index] = Grid{launch.max_blocks, false};
        if (launch.max_blocks == 0) continue;
        const Prepared* prepared = program.Find(device, index, launch);
        if (prepared == nullptr) {
          missing = index;
          break;
        }
        if (launch.persistent) grids[index].blocks = std::min(launch.max_blocks, prepared->multiprocessors);
        grids[index].early = launch.early && prepared->starts_early;
      }
    }
    if (missing == kMaxLaunches) return ffi::Error::Success();
    for (size_t index = missing; index < call.num_launches(); ++index) {
      if (call.launch(index).max_blocks == 0) continue;
      ffi::Error error = Prepare(api, call, program, device, index);
      if (error.failure()) return error;
    }
  }
  return Failure(call, "a launch could not be prepared");
}

// The program of `call` and the driver, or the reason why one is missing.
ffi::Error Resolve(const Call& call, const driver::Api*& api, Program*& program) {
  std::string problem;
  api = driver::Get(problem);
  if (api == nullptr) return NoDriver(call, problem);
  program = Table::Get().Find(call.digest);
  if (program == nullptr) return Failure(call, "program " + std::string(call.digest) + " was never instantiated");
  if (program->kernels.size() != call.num_launches()) {
    return Invalid(call, "program " + std::string(call.digest) + " has " + std::to_string(program->kernels.size()) +
                             " kernels, this call launches " + std::to_string(call.num_launches()));
  }
  return ffi::Error::Success();
}

bool HasWork(const Call& call) {
  for (size_t index = 0; index < call.num_launches(); ++index) {
    if (call.launch(index).max_blocks != 0) return true;
  }
  return call.zeroed.size() != 0;
}

}  // namespace

ffi::Error Instantiate(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attributes) {
  ffi::ErrorOr<Call> read = Read(attributes);
  if (read.has_error()) return read.error();
  const Call& call = *read;
  const std::string fault = FindFault(call);
  if (!fault.empty()) return Invalid(call, fault);
  const auto same = [&](const Program& program) {
    return program.images == call.images && program.names == call.names;
  };
  const auto clash = [&] {
    return Invalid(call, "digest " + std::string(call.digest) + " already stands for another program in this process");
  };
  Table& table = Table::Get();
  if (const Program* known = table.Find(call.digest)) return same(*known) ? ffi::Error::Success() : clash();
  std::string problem;
  const driver::Api* api = driver::Get(problem);
  if (api == nullptr) return NoDriver(call, problem);
  // Loaded outside the lock, which every running call needs: compiling PTX takes up to seconds.
  auto program = std::make_unique<Program>();
  ffi::Error error = LoadProgram(*api, call, *program);
  if (error.failure()) return error;
  std::unique_lock lock(table.mutex);
  auto [place, inserted] = table.programs.try_emplace(std::string(call.digest), nullptr);
  if (inserted) {
    place->second = std::move(program);
    return ffi::Error::Success();
  }
  // Another thread was faster; its copy stays.
  api->cuLibraryUnload(program->code);
  return same(*place->second) ? ffi::Error::Success() : clash();
}

ffi::Error Initialize(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attributes) {
  ffi::ErrorOr<Call> read = Read(attributes);
  if (read.has_error()) return read.error();
  if (!HasWork(*read)) return ffi::Error::Success();
  const driver::Api* api = nullptr;
  Program* program = nullptr;
  ffi::Error error = Resolve(*read, api, program);
  if (error.failure()) return error;
  Grids grids;
  return FindGrids(*api, *read, *program, grids);
}

ffi::Error Execute(driver::Stream stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  ffi::ErrorOr<Call> read = Read(attributes);
  if (read.has_error()) return read.error();
  const Call& call = *read;
  if (!HasWork(call)) return ffi::Error::Success();
  const driver::Api* api = nullptr;
  Program* program = nullptr;
  ffi::Error error = Resolve(call, api, program);
  if (error.failure()) return error;

  // struct Args { void* buffers[operands + results]; long long sizes[]; }, passed by value to every kernel.
  const size_t num_words = operands.size() + results.size() + call.sizes.size();
  std::array<uint64_t, kMaxArgumentBytes / sizeof(uint64_t)> words;
  if (num_words > words.size()) {
    return Invalid(call, std::to_string(operands.size()) + " operands, " + std::to_string(results.size()) +
                             " results and " + std::to_string(call.sizes.size()) + " sizes do not fit the " +
                             std::to_string(kMaxArgumentBytes) + " bytes of a kernel's parameters");
  }
  size_t filled = 0;
  for (size_t index = 0; index < operands.size(); ++index) {
    ffi::ErrorOr<ffi::AnyBuffer> buffer = operands.get<ffi::AnyBuffer>(index);
    if (buffer.has_error()) return buffer.error();
    words[filled++] = reinterpret_cast<uint64_t>(buffer->untyped_data());
  }
  for (size_t index = 0; index < results.size(); ++index) {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = results.get<ffi::AnyBuffer>(index);
    if (buffer.has_error()) return buffer.error();
    words[filled++] = reinterpret_cast<uint64_t>((*buffer)->untyped_data());
  }
  static_assert(sizeof(long long) == sizeof(int64_t) && sizeof(void*) == sizeof(uint64_t));
  if (call.sizes.size() != 0) {
    std::memcpy(&words[filled], call.sizes.begin(), call.sizes.size() * sizeof(int64_t));
  }
  for (size_t index = 0; index < program->argument_bytes.size(); ++index) {
    const size_t expected = program->argument_bytes[index];
    if (expected != 0 && expected != num_words * sizeof(uint64_t)) {
      return Invalid(call, "kernel " + SplitNames(call.names)[index] + " takes " + std::to_string(expected) +
                               " bytes of arguments, this call has " + std::to_string(operands.size()) + " operands, " +
                               std::to_string(results.size()) + " results and " + std::to_string(call.sizes.size()) +
                               " sizes of 8 bytes");
    }
  }

  Grids grids;
  error = FindGrids(*api, call, *program, grids);
  if (error.failure()) return error;
  for (int64_t which : call.zeroed) {
    if (static_cast<size_t>(which) >= results.size()) {
      return Invalid(call, "zeroed names result " + std::to_string(which) + " of " + std::to_string(results.size()));
    }
    ffi::Result<ffi::AnyBuffer> buffer = *results.get<ffi::AnyBuffer>(static_cast<size_t>(which));
    const size_t bytes = buffer->size_bytes();
    if (bytes == 0) continue;
    const auto address = reinterpret_cast<driver::DevicePointer>(buffer->untyped_data());
    const driver::Result result = api->cuMemsetD8Async(address, 0, bytes, stream);
    if (result != driver::kSuccess) return Failure(call, driver::Describe(*api, "cuMemsetD8Async", result));
  }
  // In a CUDA graph launches follow each other in the plain way: what runs a graph may rebuild or look into it, and
  // then has to know of edges of every kind.
  int capturing = 0;
  const driver::Result asked = api->cuStreamIsCapturing(stream, &capturing);
  if (asked != driver::kSuccess) return Failure(call, driver::Describe(*api, "cuStreamIsCapturing", asked));
  void* parameters[] = {words.data()};
  bool launched = false;
  for (size_t index = 0; index < call.num_launches(); ++index) {
    const Grid grid = grids[index];
    if (grid.blocks == 0) continue;
    const Launch launch = call.launch(index);
    driver::LaunchAttribute early{driver::kProgrammaticStreamSerialization, {}, {}};
    early.value.allowed = 1;
    // What may be ahead of an early launch is the call's own launch before it, never another program's.
    const unsigned num_attributes = grid.early && launched && capturing == 0 ? 1 : 0;
    const driver::LaunchConfig config{static_cast<unsigned>(grid.blocks),
                                      1,
                                      1,
                                      static_cast<unsigned>(launch.threads),
                                      1,
                                      1,
                                      static_cast<unsigned>(launch.dynamic_shared_bytes),
                                      stream,
                                      &early,
                                      num_attributes};
    const driver::Result result = api->cuLaunchKernelEx(&config, program->kernels[index], parameters, nullptr);
    launched = true;
    if (result != driver::kSuccess) {
      return Failure(
          call, "kernel " + SplitNames(call.names)[index] + ": " + driver::Describe(*api, "cuLaunchKernelEx", result));
    }
  }
  return ffi::Error::Success();
}

}  // namespace jaxcg
