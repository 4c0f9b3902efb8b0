// What the emulator's parts agree on: kernel text compiled for the host (through cuda_on_host.h), the scheduler that
// runs it, and the programs that start a launch (the CPU handler and the standalone runner).
#ifndef JAXCG_TESTS_EMULATOR_SCHEDULER_H_
#define JAXCG_TESTS_EMULATOR_SCHEDULER_H_

namespace host {

struct Index {
  unsigned x, y, z;
};

// The running thread's coordinates and the launch's shape: what threadIdx, blockIdx, blockDim and gridDim read.
extern const Index* thread_index;
extern Index block_index, block_size, grid_size;

enum class Operation { barrier, warp_barrier, shuffle, shuffle_xor, shuffle_up, shuffle_down, ballot };

// Meets all threads of the block. `line` is the line of the kernel text: two __syncthreads() are two barriers.
void sync_threads(int line);

// Meets `threads` threads at the named barrier `name`, 1 to 15: whole warps of the block, the same ones each time.
void sync_some(int name, int threads, int line = __builtin_LINE());

// Meets the lanes of `mask`. Returns the value that `source` brought along, or for a ballot the lanes whose value is
// not 0.
unsigned long long meet_warp(Operation operation, unsigned mask, unsigned long long value, int source, int line);

// One entry point of the kernel text. The table `kernels` is generated beside the text.
struct Kernel {
  const char* name;
  void (*call)(const void* arguments);
  long long argument_bytes;
  long long max_threads;  // Of __launch_bounds__, or 0.
};
extern const Kernel kernels[];
extern const int num_kernels;

// A buffer the kernel may touch, so that a fault can be described.
struct Region {
  const void* begin;
  long long bytes;
};

struct Launch {
  const char* kernel;
  const void* arguments;
  long long argument_bytes, threads, shared_bytes, blocks;
  int order;  // Of fibers and of blocks: 0 forward, 1 reverse, 2 shuffled by `seed`.
  unsigned seed;
  int seconds;  // Longer than this is an endless loop.
  const Region* regions;
  int num_regions;
  char* error;
  long long error_bytes;
};

}  // namespace host

// Runs one launch to its end. Returns 0, or 1 with the reason in `launch->error`. Not reentrant: one launch at a time.
extern "C" int jaxcg_host_launch(const host::Launch* launch);
// Whether the kernel text has an entry point of this name.
extern "C" int jaxcg_host_has_kernel(const char* name);

#endif  // JAXCG_TESTS_EMULATOR_SCHEDULER_H_
