#include "fiber.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(HC_CHECKED)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if HC_SWITCH_BY_HAND
// Push what a callee must preserve, exchange the stack pointers, pop. Kernels leave the floating-point modes
// alone.
extern "C" void hc_switch(void** save, void* load);
asm(R"(
.text
.globl hc_switch
.hidden hc_switch
.type hc_switch, @function
hc_switch:
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
  ret
.size hc_switch, .-hc_switch
)");
#endif

namespace hc {
namespace {

// Make a stack above a page that no access survives.
char* new_stack() {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* map = mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (map == MAP_FAILED || mprotect(map, page, PROT_NONE) != 0) {
    std::perror("emulation: no memory for a thread's stack");
    std::abort();
  }
  return static_cast<char*>(map) + page;
}

}  // namespace

void prepare(Context& context, void (*entry)()) {
  if (!context.stack) {
    context.stack = new_stack();
    context.stack_bytes = kStackBytes;
  }
#if defined(HC_CHECKED)
  // A thread that was abandoned in the middle leaves the red zones of its frames.
  __asan_unpoison_memory_region(context.stack, context.stack_bytes);
#endif
  context.fake_stack = nullptr;
#if HC_SWITCH_BY_HAND
  auto* top = reinterpret_cast<std::uintptr_t*>(context.stack + context.stack_bytes);
  *--top = 0;  // the entry's return address: it has none, and the stack is aligned as after a call
  *--top = reinterpret_cast<std::uintptr_t>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
  context.stack_pointer = top;
#else
  getcontext(&context.saved);
  context.saved.uc_stack.ss_sp = context.stack;
  context.saved.uc_stack.ss_size = context.stack_bytes;
  context.saved.uc_link = nullptr;
  makecontext(&context.saved, entry, 0);
#endif
}

void entered() {
#if defined(HC_CHECKED)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

void switch_to(Context& from, Context& to) {
#if defined(HC_CHECKED)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#endif
#if HC_SWITCH_BY_HAND
  hc_switch(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.saved, &to.saved);
#endif
#if defined(HC_CHECKED)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void adopt_caller(Context& context) {
  // The query costs a walk through /proc/self/maps: once per system thread.
  static thread_local void* stack = nullptr;
  static thread_local std::size_t bytes = 0;
  if (!stack) {
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
      pthread_attr_getstack(&attributes, &stack, &bytes);
      pthread_attr_destroy(&attributes);
    }
  }
  context.stack = static_cast<char*>(stack);
  context.stack_bytes = bytes;
}

}  // namespace hc
