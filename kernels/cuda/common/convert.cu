// Conversions between the four floating-point types: the codecs `none`, `fp16` and `bf16`, sums'
// accumulators.
#include "common/chunks.cuh"
#include "common/elements.cuh"
#include "common/table.cuh"

namespace hybridcomp {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 4;  // elements of a thread at a time

template <DTypeCode S, DTypeCode D, bool Add>
HC_DEVICE void convert(Grid grid, const void* from, void* to, uint64_t n, const uint32_t* status) {
  if (*status) return;
  const StorageOf<S>* src = static_cast<const StorageOf<S>*>(from);
  StorageOf<D>* dst = static_cast<StorageOf<D>*>(to);
  constexpr int kWide =
      kEach * static_cast<int>(sizeof(StorageOf<S>) > sizeof(StorageOf<D>) ? sizeof(StorageOf<S>)
                                                                           : sizeof(StorageOf<D>));
  const bool packs = aligned_to(src, kWide < 16 ? kWide : 16) && aligned_to(dst, kWide < 16 ? kWide : 16);
  const uint64_t whole = packs ? n / kEach : 0;
  for (uint64_t i = grid.thread(); i < whole; i += grid.threads()) {
    ComputeOf<S> values[kEach];
    load_pack<S, kEach>(src + i * kEach, values);
    put_pack<D, Add, kEach>(dst + i * kEach, values);
  }
  for (uint64_t i = whole * kEach + grid.thread(); i < n; i += grid.threads())
    put<D, Add>(dst + i, loaded<S>(src[i]));
}

// Compute acc += the values of `peers` messages, one after the other: the bits of as many passes, in one.
template <DTypeCode S, DTypeCode D>
HC_DEVICE void add_values(Grid grid, StorageOf<D>* acc, uint64_t n, uint32_t peers, const uint32_t* status,
                          HC_MESSAGES) {
  if (*status) return;
  const Messages messages = HC_THESE_MESSAGES;
  constexpr int kWidth = kEach * static_cast<int>(sizeof(StorageOf<S>));
  constexpr int kSumWidth = kEach * static_cast<int>(sizeof(StorageOf<D>));
  bool packs = aligned_to(acc, kSumWidth < 16 ? kSumWidth : 16);
#pragma unroll
  for (int p = 0; p < kMostPeers; ++p)
    if (static_cast<uint32_t>(p) < peers)
      packs = packs && aligned_to(messages.of[p], kWidth < 16 ? kWidth : 16);
  const uint64_t whole = packs ? n / kEach : 0;
  for (uint64_t i = grid.thread(); i < whole; i += grid.threads()) {
    using P = Pack<StorageOf<D>, kEach>;
    P sums = reinterpret_cast<const P*>(acc)[i];
#pragma unroll
    for (int p = 0; p < kMostPeers; ++p) {
      if (static_cast<uint32_t>(p) >= peers) break;
      ComputeOf<S> values[kEach];
      load_pack<S, kEach>(reinterpret_cast<const StorageOf<S>*>(messages.of[p]) + i * kEach, values);
#pragma unroll
      for (int k = 0; k < kEach; ++k) add_to(sums.of + k, static_cast<StorageOf<D>>(values[k]));
    }
    reinterpret_cast<P*>(acc)[i] = sums;
  }
  for (uint64_t i = whole * kEach + grid.thread(); i < n; i += grid.threads()) {
    StorageOf<D> sum = acc[i];
#pragma unroll
    for (int p = 0; p < kMostPeers; ++p)
      if (static_cast<uint32_t>(p) < peers)
        add_to(&sum, static_cast<StorageOf<D>>(
                         loaded<S>(reinterpret_cast<const StorageOf<S>*>(messages.of[p])[i])));
    acc[i] = sum;
  }
}

// Copy bytes, NaN payloads too, unless a message was found to be damaged.
HC_DEVICE void copy_unless_damaged(Grid grid, const uint8_t* src, uint8_t* dst, uint64_t n,
                                   const uint32_t* status) {
  if (*status) return;
  const uint64_t whole = aligned_to(src, 16) && aligned_to(dst, 16) ? n / 16 : 0;
  for (uint64_t i = grid.thread(); i < whole; i += grid.threads())
    reinterpret_cast<uint4*>(dst)[i] = reinterpret_cast<const uint4*>(src)[i];
  for (uint64_t i = whole * 16 + grid.thread(); i < n; i += grid.threads()) dst[i] = src[i];
}

}  // namespace

HC_KERNEL(kThreads) copy_bytes(const uint8_t* src, uint8_t* dst, uint64_t n, const uint32_t* status) {
  copy_unless_damaged(whole_grid(), src, dst, n, status);
}
HC_TABLE_FORM(kThreads, copy_bytes, copy_unless_damaged)

}  // namespace hybridcomp

#define HC_CONVERT(name, S, D, Add)                                                \
  HC_KERNEL(hybridcomp::kThreads)                                                  \
  name(const void* src, void* dst, std::uint64_t n, const std::uint32_t* status) { \
    hybridcomp::convert<S, D, Add>(hybridcomp::whole_grid(), src, dst, n, status); \
  }                                                                                \
  HC_TABLE_FORM(hybridcomp::kThreads, name, hybridcomp::convert<S, D, Add>)
#define HC_SUM(name, S, D)                                                                                \
  HC_KERNEL(hybridcomp::kThreads)                                                                         \
  name(hybridcomp::StorageOf<D>* acc, std::uint64_t n, std::uint32_t peers, const std::uint32_t* status,  \
       HC_MESSAGES) {                                                                                     \
    hybridcomp::add_values<S, D>(hybridcomp::whole_grid(), acc, n, peers, status, m0, m1, m2, m3, m4, m5, \
                                 m6, m7);                                                                 \
  }                                                                                                       \
  HC_TABLE_FORM(hybridcomp::kThreads, name, hybridcomp::add_values<S, D>)
#define HC_CONVERT_FROM(s, S)                                      \
  HC_CONVERT(convert_##s##_f32, S, hybridcomp::kFloat32, false)    \
  HC_CONVERT(convert_##s##_f64, S, hybridcomp::kFloat64, false)    \
  HC_CONVERT(convert_##s##_f16, S, hybridcomp::kFloat16, false)    \
  HC_CONVERT(convert_##s##_bf16, S, hybridcomp::kBFloat16, false)  \
  HC_CONVERT(convert_##s##_f32_add, S, hybridcomp::kFloat32, true) \
  HC_CONVERT(convert_##s##_f64_add, S, hybridcomp::kFloat64, true)
HC_CONVERT_FROM(f32, hybridcomp::kFloat32)
HC_CONVERT_FROM(f64, hybridcomp::kFloat64)
HC_CONVERT_FROM(f16, hybridcomp::kFloat16)
HC_CONVERT_FROM(bf16, hybridcomp::kBFloat16)
HC_SUM(sum_f32_f32, hybridcomp::kFloat32, hybridcomp::kFloat32)
HC_SUM(sum_f16_f32, hybridcomp::kFloat16, hybridcomp::kFloat32)
HC_SUM(sum_bf16_f32, hybridcomp::kBFloat16, hybridcomp::kFloat32)
HC_SUM(sum_f16_f64, hybridcomp::kFloat16, hybridcomp::kFloat64)
HC_SUM(sum_bf16_f64, hybridcomp::kBFloat16, hybridcomp::kFloat64)
HC_SUM(sum_f64_f64, hybridcomp::kFloat64, hybridcomp::kFloat64)
