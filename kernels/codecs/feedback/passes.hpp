// The kernels of error feedback over arrays of any length, by several threads. All but x are aligned and of
// the computing type: double if x is, or `wide`, else float.
#pragma once

#include <atomic>

#include "codecs/common/parallel.hpp"
#include "codecs/feedback/feedback.hpp"

namespace hybridcomp {

// Call f(at, m) for ranges of 0 .. n, at multiples of a cache line; returns whether it was true for all.
template <typename F>
bool all_of(std::size_t n, int threads, F f) {
  constexpr std::size_t kStep = 2048;
  std::atomic<bool> all{true};
  split(n, kStep, ranges_of(n, kStep, threads), [&](int, std::size_t begin, std::size_t end) {
    if (!f(begin, end - begin)) all = false;
  });
  return all;
}

inline void blend_pass(const Kernels& k, const Source& x, std::uint8_t* out, std::size_t n, int threads) {
  const std::size_t size = x.dtype == kFloat64 ? 8 : 4;
  all_of(n, threads, [&](std::size_t at, std::size_t m) {
    k.feedback->blend(x.from(at), out + at * size, m);
    return true;
  });
}

inline bool add_pass(const Kernels& k, const Source& x, const std::uint8_t* e, std::uint8_t* out,
                     std::size_t n, bool subtract, int threads) {
  const std::size_t size = x.dtype == kFloat64 ? 8 : 4;
  return all_of(n, threads, [&](std::size_t at, std::size_t m) {
    return k.feedback->add(x.from(at), e + at * size, out + at * size, m, subtract);
  });
}

inline bool modest_pass(const Kernels& k, const Source& x, const std::uint8_t* e, std::size_t n,
                        int threads) {
  const std::size_t size = x.dtype == kFloat64 ? 8 : 4;
  return all_of(n, threads, [&](std::size_t at, std::size_t m) {
    return k.feedback->modest(x.from(at), e + at * size, m);
  });
}

inline void divide_pass(const Kernels& k, std::uint8_t* x, bool wide, std::size_t n, int by, int threads) {
  if (by == 1) return;
  all_of(n, threads, [&](std::size_t at, std::size_t m) {
    k.feedback->divide(x + at * (wide ? 8 : 4), wide, m, by);
    return true;
  });
}

inline bool lose_pass(const Kernels& k, const std::uint8_t* corrected, const std::uint8_t* decoded,
                      std::uint8_t* out, bool wide, std::size_t n, double weight, int threads) {
  const std::size_t size = wide ? 8 : 4;
  return all_of(n, threads, [&](std::size_t at, std::size_t m) {
    return k.feedback->lose(corrected + at * size, decoded + at * size, out + at * size, wide, m, weight);
  });
}

inline void move_pass(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, const std::uint8_t* velocity,
                      const std::uint8_t* sum, std::uint8_t* moved, std::uint8_t* out, std::size_t n,
                      double momentum, int threads) {
  const std::size_t size = dtype == kFloat64 ? 8 : 4;
  all_of(n, threads, [&](std::size_t at, std::size_t m) {
    k.feedback->move(x + at * size_of(dtype), dtype, velocity + at * size, sum + at * size, moved + at * size,
                     out + at * size, m, momentum);
    return true;
  });
}

inline bool accelerate_pass(const Kernels& k, const std::uint8_t* x, DTypeCode dtype,
                            const std::uint8_t* velocity, std::uint8_t* moved, std::uint8_t* out,
                            std::size_t n, double momentum, int threads) {
  const std::size_t size = dtype == kFloat64 ? 8 : 4;
  return all_of(n, threads, [&](std::size_t at, std::size_t m) {
    return k.feedback->accelerate(x + at * size_of(dtype), dtype, velocity + at * size, moved + at * size,
                                  out + at * size, m, momentum);
  });
}

inline bool mask_pass(const Kernels& k, const std::uint8_t* corrected, std::uint8_t* decoded,
                      std::uint8_t* moved, bool wide, std::size_t n, int threads) {
  const std::size_t size = wide ? 8 : 4;
  return all_of(n, threads, [&](std::size_t at, std::size_t m) {
    return k.feedback->mask(corrected + at * size, decoded + at * size, moved + at * size, wide, m);
  });
}

}  // namespace hybridcomp
