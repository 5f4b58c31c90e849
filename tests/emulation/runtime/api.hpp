// Functions of libhc_emulation.so that kernels call. Included by the runtime and, through
// cuda_emulation.hpp, by every kernel: no standard header but <cstdint> here.
#pragma once

#include <cstdint>

extern "C" {

// A call site of a barrier or warp collective: one object per place in the source and template instance, so
// that threads that wait at different places are told apart however the compiler duplicates or merges the
// calls.
struct hc_site {
  const char* file;
  int line;
  const char* what;  // the intrinsic's name
};

enum hc_barrier_op { HC_BARRIER, HC_BARRIER_OR, HC_BARRIER_AND, HC_BARRIER_COUNT };

enum hc_warp_op {
  HC_SYNC,
  HC_SHFL,
  HC_SHFL_UP,
  HC_SHFL_DOWN,
  HC_SHFL_XOR,
  HC_BALLOT,
  HC_ANY,
  HC_ALL,
  HC_MATCH_ANY,
  HC_MATCH_ALL,
  HC_ADD,
  HC_MIN,
  HC_MAX,
  HC_MIN_SIGNED,
  HC_MAX_SIGNED,
  HC_AND,
  HC_OR,
  HC_XOR
};

// A thread's indices never change while it runs, hence `const`: the compiler may keep the answers.
std::uint32_t hc_thread() __attribute__((const));
std::uint32_t hc_block() __attribute__((const));
std::uint32_t hc_block_dim() __attribute__((const));
std::uint32_t hc_grid_dim() __attribute__((const));
std::uint32_t hc_active_mask();

int hc_barrier(const hc_site* site, int op, int predicate);
// `value` and the result are the bits of a lane's operand; `argument` is the lane, delta or lane mask of a
// shuffle.
std::uint64_t hc_collective(const hc_site* site, int op, std::uint32_t mask, std::uint64_t value,
                            std::uint32_t argument, std::uint32_t width);
void hc_fence();
// Called before an atomic reads and writes `bytes` at `address`.
void hc_atomic(const volatile void* address, std::uint32_t bytes);
// The block's array of this key, made at its first use in the block.
void* hc_shared(const void* key, const char* name, std::uint64_t bytes, std::uint32_t alignment);
void* hc_dynamic_shared(const char* name);
void hc_trap(const hc_site* site);
}
