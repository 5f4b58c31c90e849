// Barriers and warp collectives. Macros, so that each call tells where it stands.
#pragma once

namespace hc_emulation {

template <typename T>
HC_INLINE std::uint64_t bits(T value) {
  static_assert(std::is_arithmetic<T>::value && (sizeof(T) == 4 || sizeof(T) == 8),
                "warp exchanges take 32 and 64 bits");
  std::uint64_t result = 0;
  __builtin_memcpy(&result, &value, sizeof value);
  return result;
}
template <typename T>
HC_INLINE T value(std::uint64_t bits) {
  T result;
  __builtin_memcpy(&result, &bits, sizeof result);
  return result;
}

template <typename T>
HC_INLINE T shuffle(const hc_site* site, int op, unsigned mask, T operand, unsigned argument,
                    int width = warpSize) {
  return value<T>(hc_collective(site, op, mask, bits(operand), argument, static_cast<unsigned>(width)));
}
HC_INLINE unsigned vote(const hc_site* site, int op, unsigned mask, int predicate) {
  return static_cast<unsigned>(hc_collective(site, op, mask, predicate != 0, 0, warpSize));
}
HC_INLINE void sync_warp(const hc_site* site, unsigned mask = 0xFFFFFFFFu) {
  hc_collective(site, HC_SYNC, mask, 0, 0, warpSize);
}
template <typename T>
HC_INLINE unsigned match_any(const hc_site* site, unsigned mask, T operand) {
  return static_cast<unsigned>(hc_collective(site, HC_MATCH_ANY, mask, bits(operand), 0, warpSize));
}
template <typename T>
HC_INLINE unsigned match_all(const hc_site* site, unsigned mask, T operand, int* predicate) {
  const auto all = static_cast<unsigned>(hc_collective(site, HC_MATCH_ALL, mask, bits(operand), 0, warpSize));
  *predicate = all != 0;
  return all;
}
HC_INLINE unsigned reduce(const hc_site* site, int op, unsigned mask, unsigned operand) {
  return static_cast<unsigned>(hc_collective(site, op, mask, operand, 0, warpSize));
}
HC_INLINE int reduce(const hc_site* site, int op, unsigned mask, int operand) {
  if (op == HC_MIN) op = HC_MIN_SIGNED;
  if (op == HC_MAX) op = HC_MAX_SIGNED;
  return static_cast<int>(hc_collective(site, op, mask, static_cast<unsigned>(operand), 0, warpSize));
}

}  // namespace hc_emulation

#define __syncthreads() ((void)hc_barrier(HC_SITE("__syncthreads"), HC_BARRIER, 0))
#define __syncthreads_or(predicate) (hc_barrier(HC_SITE("__syncthreads_or"), HC_BARRIER_OR, (predicate) != 0))
#define __syncthreads_and(predicate) \
  (hc_barrier(HC_SITE("__syncthreads_and"), HC_BARRIER_AND, (predicate) != 0))
#define __syncthreads_count(predicate) \
  (hc_barrier(HC_SITE("__syncthreads_count"), HC_BARRIER_COUNT, (predicate) != 0))
#define __syncwarp(...) (hc_emulation::sync_warp(HC_SITE("__syncwarp") __VA_OPT__(, ) __VA_ARGS__))
#define __shfl_sync(...) (hc_emulation::shuffle(HC_SITE("__shfl_sync"), HC_SHFL, __VA_ARGS__))
#define __shfl_up_sync(...) (hc_emulation::shuffle(HC_SITE("__shfl_up_sync"), HC_SHFL_UP, __VA_ARGS__))
#define __shfl_down_sync(...) (hc_emulation::shuffle(HC_SITE("__shfl_down_sync"), HC_SHFL_DOWN, __VA_ARGS__))
#define __shfl_xor_sync(...) (hc_emulation::shuffle(HC_SITE("__shfl_xor_sync"), HC_SHFL_XOR, __VA_ARGS__))
#define __ballot_sync(...) (hc_emulation::vote(HC_SITE("__ballot_sync"), HC_BALLOT, __VA_ARGS__))
#define __any_sync(...) (static_cast<int>(hc_emulation::vote(HC_SITE("__any_sync"), HC_ANY, __VA_ARGS__)))
#define __all_sync(...) (static_cast<int>(hc_emulation::vote(HC_SITE("__all_sync"), HC_ALL, __VA_ARGS__)))
#define __match_any_sync(...) (hc_emulation::match_any(HC_SITE("__match_any_sync"), __VA_ARGS__))
#define __match_all_sync(...) (hc_emulation::match_all(HC_SITE("__match_all_sync"), __VA_ARGS__))
#define __reduce_add_sync(...) (hc_emulation::reduce(HC_SITE("__reduce_add_sync"), HC_ADD, __VA_ARGS__))
#define __reduce_min_sync(...) (hc_emulation::reduce(HC_SITE("__reduce_min_sync"), HC_MIN, __VA_ARGS__))
#define __reduce_max_sync(...) (hc_emulation::reduce(HC_SITE("__reduce_max_sync"), HC_MAX, __VA_ARGS__))
#define __reduce_and_sync(...) (hc_emulation::reduce(HC_SITE("__reduce_and_sync"), HC_AND, __VA_ARGS__))
#define __reduce_or_sync(...) (hc_emulation::reduce(HC_SITE("__reduce_or_sync"), HC_OR, __VA_ARGS__))
#define __reduce_xor_sync(...) (hc_emulation::reduce(HC_SITE("__reduce_xor_sync"), HC_XOR, __VA_ARGS__))
#define __activemask() (hc_active_mask())
#define __trap() (hc_trap(HC_SITE("__trap")))
