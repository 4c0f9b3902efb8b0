// Runs the threads of one block as fibers of one OS thread: a fiber runs until it waits at a barrier or a warp
// operation, then the next one that can run goes on.
//
// This file is compiled without instrumentation in every build; JAXCG_ASAN and JAXCG_TSAN say which sanitizer the
// kernel text was compiled with, and then every switch is announced to it. Under ThreadSanitizer each CUDA thread is a
// fiber of its own and only __syncthreads, __syncwarp and the end of a launch order memory, so a race is found in any
// run, whatever the order of fibers.
#include "scheduler.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "context.h"
#include "faults.h"
#include "names.h"

// Arrays declared with __shared__ and a size; both are absent when there is none.
extern "C" char __start_jaxcg_static_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_jaxcg_static_shared[] __attribute__((weak, visibility("hidden")));

namespace {
constexpr long long kMaxShared = 232448;  // 227 KB, what a block may ask for on compute capability 9.0.
constexpr long long kFence = 4096;
constexpr long long kArena = (kMaxShared + kFence + 4095) / 4096 * 4096;  // Whole pages (forget_memory).
}  // namespace

// What `extern __shared__` names; build.py binds it by this symbol.
extern "C" {
__attribute__((visibility("hidden"), aligned(4096))) unsigned char jaxcg_dynamic_shared[kArena];
}

namespace host {

const Index* thread_index;
Index block_index, block_size, grid_size;

namespace {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 1024 * 1024;  // A queue of copies for each role of a kernel lies there.
constexpr unsigned char kCanary = 0xA5;

enum class State { ready, waiting, exited };

struct Thread {
  Index index{0, 0, 0};
  Context context;
  State state = State::ready;
  Operation operation{};
  int line = 0;
  unsigned mask = 0;
  int source = 0;
  unsigned long long value = 0, result = 0;
  int place = 0;  // In `turn`.
};

struct Warp {
  unsigned present = 0, waiting = 0;
  unsigned meetings[kLanes] = {};  // By lowest lane of the mask.
  char order[kLanes][2];           // Addresses that stand for the memory order of __syncwarp.
};

// A named barrier: who waits there, and addresses that stand for its memory order. An array, since the threads fill it:
// ThreadSanitizer would take a vector that grows for a race of theirs.
struct Named {
  Thread* waiting[1024];
  int count = 0;
  unsigned meetings = 0;
  char order[2];
};

struct Block {
  std::vector<Thread> threads;
  std::vector<int> turn;
  std::vector<Warp> warps;
  size_t at_barrier = 0;
  unsigned meetings = 0;
  char order[2];  // The same for __syncthreads. Two, so that a thread ahead does not lend its order to one behind.
  Named named[16];
};

const Launch* launch;
const Kernel* kernel;
Block block;
Thread home;  // The launcher itself.
Thread* current;
std::string error;
char launch_order;

void go_to(Thread* next, bool forever = false) {
  Thread* self = current;
  current = next;
  thread_index = &next->index;
  switch_context(self->context, next->context, forever);
}

[[noreturn]] void stop(const std::string& reason) {
  error = reason;
  go_to(&home, true);
  __builtin_unreachable();
}

// The threads that wait, grouped by where, and who is missing there.
std::string describe_deadlock() {
  std::map<std::tuple<Operation, int, unsigned>, int> places;
  int exited = 0;
  bool warp_operation = false;
  for (const Thread& thread : block.threads) {
    if (thread.state == State::exited) ++exited;
    if (thread.state != State::waiting) continue;
    ++places[{thread.operation, thread.line, thread.operation == Operation::barrier ? 0 : thread.mask}];
    warp_operation |= thread.operation != Operation::barrier;
  }
  std::string text = warp_operation ? "deadlock, a warp operation lacks lanes: " : "barrier divergence: ";
  for (const auto& [place, count] : places) {
    text += std::to_string(count) + " threads wait at " +
            place_of(std::get<0>(place), std::get<1>(place), std::get<2>(place)) + ", ";
  }
  text += std::to_string(exited) + " threads have returned";
  for (size_t number = 0; number < block.warps.size() && warp_operation; ++number) {
    const Warp& warp = block.warps[number];
    if (warp.waiting == 0) continue;
    const Thread& first = block.threads[number * kLanes + __builtin_ctz(warp.waiting)];
    return text + "; warp " + std::to_string(number) + " lacks lanes " +
           lanes_of(first.mask & warp.present & ~warp.waiting);
  }
  return text;
}

// Lets the next thread go on. Returns when this one can.
void wait() {
  const size_t count = block.turn.size();
  size_t place = static_cast<size_t>(current->place);
  for (size_t tried = 0; tried < count; ++tried) {
    place = place + 1 == count ? 0 : place + 1;
    Thread* next = &block.threads[block.turn[place]];
    if (next->state != State::ready) continue;
    if (next != current) go_to(next, current->state == State::exited);
    return;
  }
  for (const Thread& thread : block.threads) {
    if (thread.state != State::exited) stop(describe_deadlock());
  }
  go_to(&home, true);
}

void run_thread() {
  finish_switch(current->context);
  kernel->call(launch->arguments);
  current->state = State::exited;
  release_order(&launch_order);
  wait();
}

std::vector<int> permute(long long count, unsigned seed) {
  std::vector<int> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  if (launch->order == 1) std::reverse(order.begin(), order.end());
  if (launch->order == 2) std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  return order;
}

// Shared memory as a new block finds it: not a number anywhere, and nothing behind its end.
void poison_shared() {
  unprotect_memory(jaxcg_dynamic_shared, sizeof jaxcg_dynamic_shared);
  forget_memory(jaxcg_dynamic_shared, sizeof jaxcg_dynamic_shared);
  memset(jaxcg_dynamic_shared, 0xFF, static_cast<size_t>(launch->shared_bytes));
  memset(jaxcg_dynamic_shared + launch->shared_bytes, kCanary, kFence);
  protect_memory(jaxcg_dynamic_shared + launch->shared_bytes,
                 sizeof jaxcg_dynamic_shared - static_cast<size_t>(launch->shared_bytes));
  if (__start_jaxcg_static_shared != nullptr) {
    memset(__start_jaxcg_static_shared, 0xFF,
           static_cast<size_t>(__stop_jaxcg_static_shared - __start_jaxcg_static_shared));
  }
}

bool is_fence_whole() {
  unprotect_memory(jaxcg_dynamic_shared, sizeof jaxcg_dynamic_shared);
  for (long long at = 0; at < kFence; ++at) {
    if (jaxcg_dynamic_shared[launch->shared_bytes + at] != kCanary) return false;
  }
  return true;
}

void run_block(char* stacks) {
  const size_t count = static_cast<size_t>(launch->threads);
  poison_shared();
  forget_memory(stacks, count * kStackBytes);
  block.threads.assign(count, Thread());
  block.warps.assign((count + kLanes - 1) / kLanes, Warp());
  block.at_barrier = 0;
  for (Named& named : block.named) named.count = 0;
  block.turn = permute(launch->threads, launch->seed + 1 + block_index.x);
  for (size_t place = 0; place < count; ++place) block.threads[block.turn[place]].place = static_cast<int>(place);
  for (size_t number = 0; number < count; ++number) {
    Thread& thread = block.threads[number];
    thread.index.x = static_cast<unsigned>(number);
    block.warps[number / kLanes].present |= 1u << number % kLanes;
    // The tops are staggered: at equal distances of a power of two they would share a few sets of the cache.
    const size_t shift = number % 61 * 192;
    make_context(thread.context, stacks + number * kStackBytes, kStackBytes - shift, run_thread);
  }
  go_to(&block.threads[block.turn[0]]);
  for (Thread& thread : block.threads) drop_context(thread.context);
  if (error.empty() && !is_fence_whole()) {
    error = "wrote past the end of dynamic shared memory (" + std::to_string(launch->shared_bytes) + " bytes)";
  }
  // Static arrays are the same memory in the next block: order the blocks, or each would race with the one before.
  if (__start_jaxcg_static_shared != nullptr) acquire_order(&launch_order);
}

void run_blocks(char* stacks) {
  for (int number : permute(launch->blocks, launch->seed)) {
    block_index = {static_cast<unsigned>(number), 0, 0};
    run_block(stacks);
    if (!error.empty()) return;
  }
  acquire_order(&launch_order);
}

std::string find_launch_fault() {
  for (int number = 0; number < num_kernels && kernel == nullptr; ++number) {
    if (!strcmp(kernels[number].name, launch->kernel)) kernel = &kernels[number];
  }
  if (kernel == nullptr) return "the kernel text has no entry point of this name";
  auto bad = [](const char* what, long long expected, long long got) {
    return std::string(what) + std::to_string(expected) + ", got " + std::to_string(got);
  };
  const long long most = kernel->max_threads > 0 ? kernel->max_threads : 1024;
  if (launch->threads < 1 || launch->threads > most) return bad("threads must be 1 to ", most, launch->threads);
  if (launch->shared_bytes < 0 || launch->shared_bytes > kMaxShared) {
    return bad("dynamic shared memory must be 0 to ", kMaxShared, launch->shared_bytes);
  }
  if (launch->argument_bytes != kernel->argument_bytes) {
    return bad("struct Args must have the bytes of all buffers and sizes, ", launch->argument_bytes,
               kernel->argument_bytes);
  }
  return "";
}

}  // namespace

void sync_threads(int line) {
  Thread* self = current;
  self->operation = Operation::barrier;
  self->line = line;
  char* order = &block.order[block.meetings % 2];
  release_order(order);
  self->state = State::waiting;
  if (++block.at_barrier < block.threads.size()) {
    wait();
  } else {
    for (const Thread& thread : block.threads) {
      if (thread.line != line) stop(describe_deadlock());
    }
    for (Thread& thread : block.threads) thread.state = State::ready;
    block.at_barrier = 0;
    ++block.meetings;
  }
  acquire_order(order);
}

void sync_some(int name, int threads, int line) {
  if (name < 1 || name > 15 || threads < 1 || threads % kLanes != 0) {
    stop("named barrier " + std::to_string(name) + " of " + std::to_string(threads) +
         " threads: names are 1 to 15, threads whole warps");
  }
  Thread* self = current;
  self->operation = Operation::barrier;
  self->line = line;
  Named& named = block.named[name];
  char* order = &named.order[named.meetings % 2];
  release_order(order);
  self->state = State::waiting;
  named.waiting[named.count++] = self;
  if (named.count < threads) {
    wait();
  } else {
    for (int number = 0; number < named.count; ++number) {
      if (named.waiting[number]->line != line) stop(describe_deadlock());
      named.waiting[number]->state = State::ready;
    }
    named.count = 0;
    ++named.meetings;
  }
  acquire_order(order);
}

unsigned long long meet_warp(Operation operation, unsigned mask, unsigned long long value, int source, int line) {
  Thread* self = current;
  const unsigned number = self->index.x / kLanes, lane = self->index.x % kLanes;
  Warp& warp = block.warps[number];
  Thread* lanes = &block.threads[number * kLanes];
  self->operation = operation;
  self->line = line;
  self->mask = mask;
  self->value = value;
  self->source = source;
  const unsigned members = mask & warp.present;
  if (!(members >> lane & 1)) {
    stop("lane " + std::to_string(lane) + " calls " + place_of(operation, line, mask) + " but is not in the mask");
  }
  if (operation < Operation::ballot && operation > Operation::warp_barrier && !(members >> source & 1)) {
    stop("lane " + std::to_string(lane) + " reads lane " + std::to_string(source) + ", which is not in the mask, at " +
         place_of(operation, line, mask));
  }
  const int lowest = __builtin_ctz(mask);
  char* order = &warp.order[lowest][warp.meetings[lowest] % 2];
  // Only __syncwarp orders memory; CUDA promises nothing of the kind for shuffles and votes.
  if (operation == Operation::warp_barrier) release_order(order);
  self->state = State::waiting;
  warp.waiting |= 1u << lane;
  if ((warp.waiting & members) != members) {
    wait();
  } else {
    unsigned long long votes = 0;
    for (unsigned left = members; left != 0; left &= left - 1) {
      Thread& thread = lanes[__builtin_ctz(left)];
      if (thread.mask != mask || thread.operation != operation || thread.line != line) {
        stop("lanes of warp " + std::to_string(number) + " meet at different operations: lane " +
             std::to_string(__builtin_ctz(left)) + " at " + place_of(thread.operation, thread.line, thread.mask) +
             ", lane " + std::to_string(lane) + " at " + place_of(operation, line, mask));
      }
      if (thread.value != 0) votes |= left & -left;
      thread.result = lanes[thread.source].value;
      thread.state = State::ready;
    }
    if (operation == Operation::ballot) {
      for (unsigned left = members; left != 0; left &= left - 1) lanes[__builtin_ctz(left)].result = votes;
    }
    warp.waiting &= ~members;
    ++warp.meetings[lowest];
  }
  if (operation == Operation::warp_barrier) acquire_order(order);
  return self->result;
}

void stop_at_fault(const std::string& reason) { stop(reason); }

}  // namespace host

extern "C" __attribute__((visibility("default"))) int jaxcg_host_has_kernel(const char* name) {
  for (int number = 0; number < host::num_kernels; ++number) {
    if (!strcmp(host::kernels[number].name, name)) return 1;
  }
  return 0;
}

extern "C" __attribute__((visibility("default"))) int jaxcg_host_launch(const host::Launch* asked) {
  using namespace host;
  launch = asked;
  kernel = nullptr;
  error = find_launch_fault();
  block_size = {static_cast<unsigned>(launch->threads), 1, 1};
  grid_size = {static_cast<unsigned>(launch->blocks), 1, 1};
  std::string where;
  if (error.empty() && launch->blocks > 0) {
    const size_t bytes = static_cast<size_t>(launch->threads) * kStackBytes;
    void* stacks = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) {
      error = "no memory for the stacks of " + std::to_string(launch->threads) + " threads";
    } else {
      for (size_t at = 0; at < bytes; at += kStackBytes) mprotect(static_cast<char*>(stacks) + at, 4096, PROT_NONE);
      current = &home;
      adopt_context(home.context);
      const std::string fault = run_guarded(*launch, [&] { run_blocks(static_cast<char*>(stacks)); });
      if (!fault.empty()) error = fault + " (thread " + std::to_string(current->index.x) + ")";
      munmap(stacks, bytes);
      where = ", block " + std::to_string(block_index.x) + " of " + std::to_string(launch->blocks);
    }
  }
  if (error.empty()) return 0;
  snprintf(launch->error, static_cast<size_t>(launch->error_bytes), "kernel '%s'%s: %s", launch->kernel, where.c_str(),
           error.c_str());
  return 1;
}
