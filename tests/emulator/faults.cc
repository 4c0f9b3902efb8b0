#include "faults.h"

#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <vector>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace host {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr size_t kSignalStack = 64 * 1024;

sigjmp_buf rescue;
pid_t guarded_thread;
int fault_signal;
const void* fault_address;
struct sigaction before[NSIG];

int alarm_signal() { return SIGRTMIN + 7; }

void on_signal(int number, siginfo_t* info, void*) {
  if (syscall(SYS_gettid) != guarded_thread) {
    // Not ours: the instruction runs again, into the handler that was there before.
    sigaction(number, &before[number], nullptr);
    return;
  }
  fault_signal = number;
  fault_address = info->si_addr;
  siglongjmp(rescue, 1);
}

std::string describe_address(const Launch& launch, const void* address) {
  const Region* nearest = nullptr;
  int number = -1;
  long long distance = 0;
  const intptr_t at = reinterpret_cast<intptr_t>(address);
  for (int index = 0; index < launch.num_regions; ++index) {
    const Region& region = launch.regions[index];
    const intptr_t begin = reinterpret_cast<intptr_t>(region.begin), end = begin + region.bytes;
    const long long away = at < begin ? begin - at : at >= end ? at - end : 0;
    if (nearest == nullptr || away < distance) nearest = &region, number = index, distance = away;
  }
  if (nearest == nullptr || distance > (1 << 24)) return "far from every buffer";
  const std::string which = "buffer " + std::to_string(number) + " (" + std::to_string(nearest->bytes) + " bytes)";
  const intptr_t begin = reinterpret_cast<intptr_t>(nearest->begin);
  if (at < begin) return std::to_string(distance) + " bytes before the start of " + which;
  if (at >= begin + nearest->bytes) return std::to_string(distance) + " bytes past the end of " + which;
  return "a store into " + which + ", which is an operand";
}

std::string describe(const Launch& launch) {
  if (fault_signal == alarm_signal()) {
    return "endless loop: not done after " + std::to_string(launch.seconds) + " seconds";
  }
  if (fault_signal == SIGFPE) return "integer division by zero";
  if (fault_signal == SIGILL) return "reached code that cannot be reached";
  return "invalid address: " + describe_address(launch, fault_address);
}

}  // namespace

#if defined(JAXCG_ASAN) || defined(JAXCG_TSAN)
// The sanitizers report faults themselves, with the line.
std::string run_guarded(const Launch&, const std::function<void()>& body) {
  body();
  return "";
}
#else
std::string run_guarded(const Launch& launch, const std::function<void()>& body) {
  guarded_thread = static_cast<pid_t>(syscall(SYS_gettid));
  fault_signal = 0;
  // On a stack of its own: the fiber's may be what has run out.
  static std::vector<char> memory(kSignalStack);
  stack_t stack{}, stack_before{};
  stack.ss_sp = memory.data();
  stack.ss_size = memory.size();
  sigaltstack(&stack, &stack_before);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : kSignals) sigaction(number, &action, &before[number]);
  sigaction(alarm_signal(), &action, &before[alarm_signal()]);
  sigevent event{};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = alarm_signal();
  event._sigev_un._tid = guarded_thread;
  timer_t timer;
  const bool timed = timer_create(CLOCK_MONOTONIC, &event, &timer) == 0;
  itimerspec limit{};
  limit.it_value.tv_sec = launch.seconds;
  if (timed) timer_settime(timer, 0, &limit, nullptr);
#ifdef __SSE__
  // XLA's threads flush subnormal numbers to zero; a GPU does not.
  const unsigned control = _mm_getcsr();
  _mm_setcsr(0x1F80);
#endif
  if (sigsetjmp(rescue, 1) == 0) body();
#ifdef __SSE__
  _mm_setcsr(control);
#endif
  if (timed) timer_delete(timer);
  for (int number : kSignals) sigaction(number, &before[number], nullptr);
  sigaction(alarm_signal(), &before[alarm_signal()], nullptr);
  sigaltstack(&stack_before, nullptr);
  return fault_signal == 0 ? "" : describe(launch);
}
#endif

}  // namespace host

// ---- -fsanitize=alignment,bounds without its library ---------------------------------------------------------------
// The kernel text is compiled with these checks and calls the functions below, so that a finding ends the launch and
// not the process.

namespace {

struct Place {
  const char* file;
  uint32_t line, column;
};
struct Type {
  uint16_t kind, info;
  char name[1];
};
struct TypeMismatch {
  Place place;
  const Type* type;
  unsigned char log_alignment, kind;
};
struct OutOfBounds {
  Place place;
  const Type *array, *index;
};

}  // namespace

extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(TypeMismatch* data,
                                                                                      uintptr_t pointer) {
  const std::string line =
      " on line " + std::to_string(data->place.line) + ", column " + std::to_string(data->place.column);
  if (pointer == 0) host::stop_at_fault("null pointer of type " + std::string(data->type->name) + line);
  host::stop_at_fault("misaligned address" + line + ": type " + data->type->name + " needs alignment " +
                      std::to_string(1 << data->log_alignment) + ", the address is a multiple of " +
                      std::to_string(pointer & -pointer));
}

extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_out_of_bounds(OutOfBounds* data, uintptr_t index) {
  host::stop_at_fault("index " + std::to_string(static_cast<long long>(index)) + " is outside " + data->array->name +
                      " on line " + std::to_string(data->place.line));
}
