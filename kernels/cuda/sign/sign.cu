// The sign quantizer: the means and signs of kernels/codecs/sign/loops.cpp.
#include "hybridcomp/sign.hpp"

#include "common/chunks.cuh"

namespace hybridcomp {
namespace {

constexpr int kThreads = 256;
constexpr uint32_t kLanes = kSignLanes;
static_assert(kLanes == 16, "two blocks to a warp");

struct Parts {
  uint8_t* means;
  uint8_t* bits;
};
// Return the sections of a payload; the signs begin at an address divisible by 4.
template <typename T>
HC_DEVICE Parts parts_of(uint8_t* payload, uint64_t n, uint32_t block) {
  uint8_t* means = payload + sizeof(QuantizePrefix);
  return {means, means + (n + block - 1) / block * sizeof(T)};
}

HC_DEVICE bool negative(float x) { return bits_of(x) >> 31; }
HC_DEVICE bool negative(double x) { return bits_of(x) >> 63; }

// Add the terms of Steps times sixteen elements, an even number of times, to the lanes of each half warp.
// They are steps `from` and on of a group of 32: lane j of a half keeps in `word` the signs of steps 2 j and
// 2 j + 1. `src` is the lane's own first element. Checked: elements past the `left` ones from there on count
// as zero.
template <DTypeCode D, int Steps, bool Checked>
HC_DEVICE void add_steps(const StorageOf<D>* src, uint32_t left, uint32_t from, ComputeOf<D>* sum,
                         uint32_t* word) {
  const uint32_t lane = lane_of();
  const uint32_t halves = lane < kLanes ? 0x5410u : 0x7632u;
  StorageOf<D> x[Steps];
#pragma unroll
  for (int i = 0; i < Steps; ++i) x[i] = !Checked || i * kLanes < left ? src[i * kLanes] : StorageOf<D>(0);
#pragma unroll
  for (int i = 0; i < Steps; i += 2) {
    const ComputeOf<D> first = loaded<D>(x[i]), second = loaded<D>(x[i + 1]);
    *sum += sign_term(first);
    *sum += sign_term(second);
    const uint32_t even = __ballot_sync(kFullWarp, negative(first));
    const uint32_t odd = __ballot_sync(kFullWarp, negative(second));
    const uint32_t pair = __byte_perm(even, odd, halves);
    if ((lane & (kLanes - 1)) == (from + i) / 2) *word = pair;
  }
}

// Return how many elements are left after so many steps.
HC_DEVICE uint32_t beyond(uint32_t left, uint32_t steps) {
  return left > steps * kLanes ? left - steps * kLanes : 0;
}

// Write the signs of 32 elements, or of fewer at the end: at most `bytes`.
HC_DEVICE void put_signs(uint8_t* to, uint32_t word, uint32_t bytes) {
  if (bytes >= 4 && aligned_to(to, 4)) {
    *reinterpret_cast<uint32_t*>(to) = word;
  } else {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      if (i < bytes) to[i] = static_cast<uint8_t>(word >> (8 * i));
  }
}

// Encode by half a warp for each block, a thread for each of the sixteen sums: a load is 64 bytes in a row,
// and each thread has one chain of additions, whose order is fixed.
template <DTypeCode D>
HC_DEVICE void encode(const void* from, uint64_t n, uint32_t block, uint8_t* payload) {
  using T = ComputeOf<D>;
  constexpr uint32_t kGroup = 32 * kLanes;  // elements whose signs are a word of each lane
  // Steps whose loads are all in flight at once: as many as registers allow.
  constexpr int kAtOnce = D == kFloat64 || D == kFloat16 ? 16 : 32;
  if (global_thread() == 0) *reinterpret_cast<QuantizePrefix*>(payload) = {block, 0};
  const StorageOf<D>* src = static_cast<const StorageOf<D>*>(from);
  const Parts parts = parts_of<T>(payload, n, block);
  const uint32_t lane = lane_of(), j = lane & (kLanes - 1), half = lane / kLanes;
  for (uint64_t pair = global_warp(); pair * 2 * block < n; pair += global_warps()) {
    const uint64_t b = pair * 2 + half, begin = b * block;
    const uint32_t m = begin >= n ? 0 : n - begin < block ? static_cast<uint32_t>(n - begin) : block;
    const uint64_t last = (pair * 2 + 1) * block;  // start of the warp's second block
    T sum = 0;
    for (uint32_t at = 0; at < block; at += kGroup) {
      uint32_t word = 0;
      const StorageOf<D>* x = src + begin + at + j;
      const uint32_t left = at + j < m ? m - at - j : 0;
      if (at + kGroup <= block) {
        const bool all = last + at + kGroup <= n;  // the same in all lanes
#pragma unroll
        for (int step = 0; step < 32; step += kAtOnce) {
          if (all)
            add_steps<D, kAtOnce, false>(x + step * kLanes, 0, step, &sum, &word);
          else
            add_steps<D, kAtOnce, true>(x + step * kLanes, beyond(left, step), step, &sum, &word);
        }
      } else {
        uint32_t step = 0;
        for (; (step + 8) * kLanes <= block - at; step += 8)
          add_steps<D, 8, true>(x + step * kLanes, beyond(left, step), step, &sum, &word);
        for (; step * kLanes < block - at; step += 2)
          add_steps<D, 2, true>(x + step * kLanes, beyond(left, step), step, &sum, &word);
      }
      const uint32_t first = at + 32 * j;  // the block's first element whose sign is in the word
      if (first < m) put_signs(parts.bits + (begin + first) / 8, word, (m - first + 7) / 8);
    }
#pragma unroll
    for (uint32_t apart = kLanes / 2; apart; apart /= 2) sum += __shfl_down_sync(kFullWarp, sum, apart);
    if (j == 0 && m) reinterpret_cast<T*>(parts.means)[b] = sign_mean(sum, m);
  }
}

HC_DEVICE float with_sign(float mean, uint32_t bits, uint32_t i) {
  return float_of(bits_of(mean) ^ ((bits >> i & 1u) << 31));
}
HC_DEVICE double with_sign(double mean, uint32_t bits, uint32_t i) {
  return float_of(bits_of(mean) ^ (static_cast<uint64_t>(bits >> i & 1u) << 63));
}

template <typename T, DTypeCode D, bool Add>
HC_DEVICE void decode(const uint8_t* payload, uint64_t n, uint32_t block, void* to, const uint32_t* status) {
  if (*status) return;
  StorageOf<D>* out = static_cast<StorageOf<D>*>(to);
  const Parts parts = parts_of<T>(const_cast<uint8_t*>(payload), n, block);
  const T* means = reinterpret_cast<const T*>(parts.means);
  const bool packs = packs_of_four<D>(out);
  const uint32_t lane = lane_of();
  const uint64_t whole = n / kChunk * kChunk;
  put_rest<D, Add>(out, whole, n, [&](uint64_t e) {
    return with_sign(means[e / block], parts.bits[e / 8], static_cast<uint32_t>(e % 8));
  });
  for (uint64_t at = global_warp() * kChunk; at < whole; at += global_warps() * kChunk) {
    const uint32_t word = reinterpret_cast<const uint32_t*>(parts.bits + at / 8)[lane];
    const NearBlocks near = near_blocks(at, block);
    T mean[kRows];  // blocks are whole multiples of 8, so that four elements share one
#pragma unroll
    for (int row = 0; row < kRows; ++row) mean[row] = means[near(row * kRow + kFour * lane)];
    put_chunk<D, Add, T>(out + at, packs, [&](int row, T* v) {
      const uint32_t bits =
          __shfl_sync(kFullWarp, word, kFour * row + static_cast<int>(lane / 8)) >> (4 * (lane % 8));
#pragma unroll
      for (int i = 0; i < kFour; ++i) v[i] = with_sign(mean[row], bits, static_cast<uint32_t>(i));
    });
  }
}

template <typename T>
HC_DEVICE void sum(T* acc, uint64_t n, uint32_t block, uint32_t peers, const Messages& messages,
                   const uint32_t* status) {
  if (*status) return;
  const uint64_t bits_at = sizeof(QuantizePrefix) + (n + block - 1) / block * sizeof(T);
  const auto mean_of = [](const uint8_t* payload, uint64_t b) {
    return reinterpret_cast<const T*>(payload + sizeof(QuantizePrefix))[b];
  };
  sum_messages<T, T>(
      acc, n / kSumChunk * kSumChunk, n, block, messages, peers,
      [&](const uint8_t* payload, uint64_t e, uint64_t b, uint32_t* word, T* mean) {
        *mean = mean_of(payload, b);
        *word = static_cast<uint32_t>(payload[bits_at + e / 8]) >> (e % 8);
      },
      [](uint32_t word, T mean, T* v) {
#pragma unroll
        for (uint32_t i = 0; i < kFour; ++i) v[i] = with_sign(mean, word, i);
      },
      [&](const uint8_t* payload, uint64_t e) {
        return with_sign(mean_of(payload, e / block), payload[bits_at + e / 8], static_cast<uint32_t>(e % 8));
      });
}

}  // namespace
}  // namespace hybridcomp

// `payload` is 16-byte aligned, `n` elements at `src` aligned to their size.
#define HC_ENCODE(name, D)                                                             \
  HC_KERNEL(hybridcomp::kThreads)                                                      \
  name(const void* src, std::uint64_t n, std::uint32_t block, std::uint8_t* payload) { \
    hybridcomp::encode<D>(src, n, block, payload);                                     \
  }
HC_EACH_INPUT(HC_ENCODE, sign_encode)

#define HC_DECODE(name, T, D, Add)                                                   \
  HC_KERNEL(hybridcomp::kThreads)                                                    \
  name(const std::uint8_t* payload, std::uint64_t n, std::uint32_t block, void* out, \
       const std::uint32_t* status) {                                                \
    hybridcomp::decode<T, D, Add>(payload, n, block, out, status);                   \
  }
HC_EACH_OUTPUT(HC_DECODE, sign_decode)

// Compute acc += `peers` messages with the same block size, which lie at the first of the addresses.
#define HC_SUM(name, T)                                                                                \
  HC_KERNEL(hybridcomp::kThreads)                                                                      \
  name(T* acc, std::uint64_t n, std::uint32_t block, std::uint32_t peers, const std::uint32_t* status, \
       HC_MESSAGES) {                                                                                  \
    const hybridcomp::Messages messages HC_THESE_MESSAGES;                                             \
    hybridcomp::sum<T>(acc, n, block, peers, messages, status);                                        \
  }
HC_SUM(sign_sum_f32, float)
HC_SUM(sign_sum_f64, double)
