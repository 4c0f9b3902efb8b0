// Switching between fibers, and what the sanitizers need to hear about it.
#ifndef JAXCG_TESTS_EMULATOR_CONTEXT_H_
#define JAXCG_TESTS_EMULATOR_CONTEXT_H_

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#if !defined(__x86_64__) || defined(JAXCG_UCONTEXT)
#define JAXCG_UCONTEXT 1
#include <ucontext.h>
#endif
#ifdef JAXCG_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef JAXCG_TSAN
#include <sanitizer/tsan_interface.h>
#endif

#ifndef JAXCG_UCONTEXT
// Saves what a callee must keep and the stack pointer, then does the reverse: 3 ns, where swapcontext takes 300 for
// its system call. The floating-point control words stay as they are; kernel text does not touch them.
extern "C" void jaxcg_switch_stack(void** save, void* load);
asm(R"(
.text
.hidden jaxcg_switch_stack
.globl jaxcg_switch_stack
.type jaxcg_switch_stack, @function
jaxcg_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rdx
  jmpq *%rdx
.size jaxcg_switch_stack, .-jaxcg_switch_stack
)");
#endif

namespace host {

struct Context {
#ifdef JAXCG_UCONTEXT
  ucontext_t* machine = nullptr;
#else
  void* stack_pointer = nullptr;
#endif
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's.
  void* fiber = nullptr;       // ThreadSanitizer's.
};

static Context* last_left;

// To be called first on a stack that was switched to.
inline void finish_switch(Context& self) {
#ifdef JAXCG_ASAN
  __sanitizer_finish_switch_fiber(self.fake_stack, &last_left->stack, &last_left->stack_bytes);
#endif
  (void)self;
}

inline void switch_context(Context& from, Context& to, bool forever) {
  last_left = &from;
#ifdef JAXCG_ASAN
  __sanitizer_start_switch_fiber(forever ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#endif
#ifdef JAXCG_TSAN
  __tsan_switch_to_fiber(to.fiber, __tsan_switch_to_fiber_no_sync);
#endif
  (void)forever;
#ifdef JAXCG_UCONTEXT
  swapcontext(from.machine, to.machine);
#else
  jaxcg_switch_stack(&from.stack_pointer, to.stack_pointer);
#endif
  finish_switch(from);
}

inline void make_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
  context.stack = stack;
  context.stack_bytes = bytes;
#ifdef JAXCG_ASAN
  __asan_unpoison_memory_region(stack + 4096, bytes - 4096);  // The first page is the guard.
#endif
#ifdef JAXCG_TSAN
  context.fiber = __tsan_create_fiber(0);
#endif
#ifdef JAXCG_UCONTEXT
  context.machine = new ucontext_t;
  getcontext(context.machine);
  context.machine->uc_stack.ss_sp = stack;
  context.machine->uc_stack.ss_size = bytes;
  makecontext(context.machine, entry, 0);
#else
  // Six saved registers, the address to go to, and a null return address, below which the stack is aligned for a call.
  void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15}) - 8;
  for (int slot = 0; slot < 8; ++slot) top[slot] = nullptr;
  top[6] = reinterpret_cast<void*>(entry);
  context.stack_pointer = top;
#endif
}

// The stack we are already on.
inline void adopt_context(Context& context) {
#ifdef JAXCG_TSAN
  context.fiber = __tsan_get_current_fiber();
#endif
#ifdef JAXCG_UCONTEXT
  if (context.machine == nullptr) context.machine = new ucontext_t;
#endif
  (void)context;
}

inline void drop_context(Context& context) {
#ifdef JAXCG_TSAN
  __tsan_destroy_fiber(context.fiber);
#endif
#ifdef JAXCG_UCONTEXT
  delete context.machine;
#endif
  (void)context;
}

// Happens-before, as ThreadSanitizer sees it: all that came before a release comes before what follows an acquire.
inline void release_order(void* point) {
#ifdef JAXCG_TSAN
  __tsan_release(point);
#endif
  (void)point;
}
inline void acquire_order(void* point) {
#ifdef JAXCG_TSAN
  __tsan_acquire(point);
#endif
  (void)point;
}

// Whole pages that another block used are new memory to ThreadSanitizer.
inline void forget_memory(void* begin, size_t bytes) {
#ifdef JAXCG_TSAN
  mmap(begin, (bytes + 4095) & ~size_t{4095}, PROT_READ | PROT_WRITE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
#endif
  (void)begin, (void)bytes;
}

inline void protect_memory(void* begin, size_t bytes) {
#ifdef JAXCG_ASAN
  __asan_poison_memory_region(begin, bytes);
#endif
  (void)begin, (void)bytes;
}
inline void unprotect_memory(void* begin, size_t bytes) {
#ifdef JAXCG_ASAN
  __asan_unpoison_memory_region(begin, bytes);
#endif
  (void)begin, (void)bytes;
}

}  // namespace host

#endif  // JAXCG_TESTS_EMULATOR_CONTEXT_H_
