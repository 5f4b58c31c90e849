// Flows of control with stacks of their own, switched by hand: a CUDA thread is one.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) || defined(HC_UCONTEXT)
#define HC_SWITCH_BY_HAND 0
#include <ucontext.h>
#else
#define HC_SWITCH_BY_HAND 1
#endif

namespace hc {

inline constexpr std::size_t kStackBytes = 256 * 1024;

// The place where a suspended flow of control goes on, and its stack, which AddressSanitizer must be told of.
struct Context {
#if HC_SWITCH_BY_HAND
  void* stack_pointer = nullptr;
#else
  ucontext_t saved{};
#endif
  char* stack = nullptr;  // lowest byte
  std::size_t stack_bytes = 0;
  void* fake_stack = nullptr;
};

// Let `context` begin at `entry`, which must not return. Its stack is made at the first call, and kept.
void prepare(Context& context, void (*entry)());
// An entry must call this first.
void entered();
void switch_to(Context& from, Context& to);
// Note the stack of the calling system thread in a context that it will be suspended in.
void adopt_caller(Context& context);

}  // namespace hc
