// Floating-point formats of 8 and 4 bits: the payloads of kernels/codecs/minifloat/loops.cpp. HC_MX chooses
// the codecs: 0 for `fp8`, 1 for `mxfp8` and `mxfp4`.
#include "minifloat/minifloat.cuh"

namespace hybridcomp {
namespace {

constexpr bool kMx = HC_MX;
constexpr int kThreads = 256;

HC_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// -- encode
// ----------------------------------------------------------------------------------------------------

// Return the largest over `Lanes` neighbouring lanes of one of a lane's eight values: lane l of them gets
// that of value l / (Lanes / 8). Values and lanes are halved together, as long as there are values.
template <int Lanes>
HC_DEVICE uint32_t largest_of(uint32_t* v) {
  const uint32_t lane = lane_of();
#pragma unroll
  for (int half = kRows / 2, apart = Lanes / 2; apart; half /= 2, apart /= 2) {
    if (half) {
      const bool upper = lane & static_cast<uint32_t>(apart);
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const uint32_t keep = upper ? v[i + half] : v[i], send = upper ? v[i] : v[i + half];
        v[i] = larger(keep, __shfl_xor_sync(kFullWarp, send, apart));
      }
    } else {
      v[0] = larger(v[0], __shfl_xor_sync(kFullWarp, v[0], apart));
    }
  }
  return v[0];
}

// Encode a warp's chunk; a lane has its four elements of each row in x. Blocks have 4 * Lanes elements, or,
// if those are whole rows, 1, 2, 4 or 8 rows. `left`: elements from the chunk's beginning to the array's end;
// elements beyond are zero.
template <MinifloatFormat F, int Lanes>
HC_DEVICE void encode_chunk(const float (*x)[kFour], uint32_t left, uint32_t block, uint8_t* scales,
                            uint8_t* codes) {
  constexpr uint32_t kEach = 32 / Lanes;     // blocks in a row
  constexpr uint32_t kSame = Lanes / kRows;  // lanes that know the same row's peak
  const uint32_t lane = lane_of();
  uint32_t peaks[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    peaks[row] = 0;
#pragma unroll
    for (int i = 0; i < kFour; ++i) peaks[row] = larger(peaks[row], magnitude(x[row][i]));
  }
  const uint32_t of_rows = Lanes == 32 ? block / kRow : 1;  // rows of a block, which all get its peak
#pragma unroll
  for (int apart = 1; apart < kRows; apart *= 2) {
    if (of_rows < static_cast<uint32_t>(2 * apart)) break;
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      if (!(row & apart)) peaks[row] = peaks[row + apart] = larger(peaks[row], peaks[row + apart]);
  }
  // One lane finds the scale for many: divisions are slow.
  const uint32_t row_of = lane % Lanes / kSame;
  const typename Scale<kMx>::Type scale = Scale<kMx>::template of<F>(largest_of<Lanes>(peaks));
  const uint32_t at = kEach > 1 ? row_of * kEach + lane / Lanes : row_of / of_rows;
  if (lane % kSame == 0 && (of_rows == 1 || row_of % of_rows == 0) && at * block < left)
    reinterpret_cast<decltype(scale.stored)*>(scales)[at] = scale.stored;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const float inverse =
        __shfl_sync(kFullWarp, scale.inverse,
                    static_cast<int>(lane / Lanes * Lanes + static_cast<uint32_t>(row) * kSame));
    const uint32_t word = codes_of<F, kMx>(x[row], inverse);
    uint8_t* to = codes + code_bytes<F>(row * kRow);
    if (left >= (row + 1) * kRow) {
      if constexpr (Minifloat<F>::kBits == 8)
        put_words(to, word);
      else
        put_halves(to, word);
    } else {
      const uint32_t done = row * kRow + kFour * lane;
      const uint32_t bytes = code_bytes<F>(left > done ? left - done : 0);
      to += code_bytes<F>(kFour) * lane;
#pragma unroll
      for (int i = 0; i < static_cast<int>(code_bytes<F>(kFour)); ++i)
        if (static_cast<uint32_t>(i) < bytes) to[i] = static_cast<uint8_t>(word >> (8 * i));
    }
  }
}

// Encode blocks of 32 elements, or of 64 to 1024 that are a power of two: a chunk at a time in registers.
template <MinifloatFormat F, DTypeCode D>
HC_DEVICE void encode(const void* from, uint64_t n, uint32_t size, uint8_t* payload) {
  const uint32_t block = kMx ? kMxBlock : size;
  if (global_thread() == 0) *reinterpret_cast<MinifloatPrefix*>(payload) = {block, F};
  const StorageOf<D>* src = static_cast<const StorageOf<D>*>(from);
  const bool packs = packs_of_four<D>(src);
  uint8_t* const scales = payload + sizeof(MinifloatPrefix);
  uint8_t* const codes = payload + codes_at<kMx>(n, block);
  for (uint64_t at = global_warp() * kChunk; at < n; at += global_warps() * kChunk) {
    const StorageOf<D>* own = src + at + kFour * lane_of();
    const uint32_t left = n - at < kChunk ? static_cast<uint32_t>(n - at) : kChunk;
    float x[kRows][kFour];
    if (left == kChunk && packs) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        ComputeOf<D> four[kFour];
        load_pack<D, kFour>(own + row * kRow, four);
#pragma unroll
        for (int i = 0; i < kFour; ++i) x[row][i] = static_cast<float>(four[i]);
      }
    } else {
      const uint32_t mine = left > kFour * lane_of() ? left - kFour * lane_of() : 0;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
#pragma unroll
        for (int i = 0; i < kFour; ++i)
          x[row][i] = row * kRow + i < mine ? static_cast<float>(loaded<D>(own[row * kRow + i])) : 0.0f;
      }
    }
    uint8_t* const to = scales + at / block * kScaleBytes<kMx>;
    if (kMx || block == 32)
      encode_chunk<F, 8>(x, left, block, to, codes + code_bytes<F>(at));
    else if (block == 64)
      encode_chunk<F, 16>(x, left, block, to, codes + code_bytes<F>(at));
    else
      encode_chunk<F, 32>(x, left, block, to, codes + code_bytes<F>(at));
  }
}

#if !HC_MX

constexpr int kMostThreads = 1024;

// Encode blocks of any size, by a warp or (Whole) a block of threads each, in two passes: the second finds
// the elements in a cache.
template <MinifloatFormat F, DTypeCode D, bool Whole>
HC_DEVICE void encode_any(const void* from, uint64_t n, uint32_t block, uint8_t* payload) {
  HC_SHARED(uint32_t, warps, kMostThreads / 32);
  if (global_thread() == 0) *reinterpret_cast<MinifloatPrefix*>(payload) = {block, F};
  const StorageOf<D>* src = static_cast<const StorageOf<D>*>(from);
  const bool packs = packs_of_four<D>(src);
  float* const scales = reinterpret_cast<float*>(payload + sizeof(MinifloatPrefix));
  uint8_t* const codes = payload + codes_at<false>(n, block);
  const uint32_t thread = Whole ? threadIdx.x : lane_of(), threads = Whole ? blockDim.x : 32;
  const uint64_t teams = Whole ? gridDim.x : global_warps();
  for (uint64_t b = Whole ? blockIdx.x : global_warp(); b * block < n; b += teams) {
    const uint64_t begin = b * block;
    const uint32_t m = n - begin < block ? static_cast<uint32_t>(n - begin) : block;
    const uint32_t fours = packs ? m / kFour : 0;
    const StorageOf<D>* x = src + begin;
    uint32_t peak = 0;
#pragma unroll 4
    for (uint32_t i = thread; i < fours; i += threads) {
      ComputeOf<D> four[kFour];
      load_pack<D, kFour>(x + kFour * i, four);
#pragma unroll
      for (int k = 0; k < kFour; ++k) peak = larger(peak, magnitude(static_cast<float>(four[k])));
    }
    for (uint32_t i = fours * kFour + thread; i < m; i += threads)
      peak = larger(peak, magnitude(static_cast<float>(loaded<D>(x[i]))));
#pragma unroll
    for (int apart = 16; apart; apart /= 2) peak = larger(peak, __shfl_xor_sync(kFullWarp, peak, apart));
    if constexpr (Whole) {
      if (lane_of() == 0) warps[thread / 32] = peak;
      __syncthreads();
      peak = lane_of() < threads / 32 ? warps[lane_of()] : 0;
#pragma unroll
      for (int apart = 16; apart; apart /= 2) peak = larger(peak, __shfl_xor_sync(kFullWarp, peak, apart));
      __syncthreads();  // the next block's peaks go to the same place
    }
    const BlockScale<float> scale = minifloat_scale<F>(peak);
    if (thread == 0) scales[b] = scale.stored;
#pragma unroll 4
    for (uint32_t i = thread; i < fours; i += threads) {
      ComputeOf<D> four[kFour];
      float values[kFour];
      load_pack<D, kFour>(x + kFour * i, four);
#pragma unroll
      for (int k = 0; k < kFour; ++k) values[k] = static_cast<float>(four[k]);
      reinterpret_cast<uint32_t*>(codes + begin)[i] = codes_of<F, false>(values, scale.inverse);
    }
    for (uint32_t i = fours * kFour + thread; i < m; i += threads)
      codes[begin + i] =
          static_cast<uint8_t>(code_of<F, false>(static_cast<float>(loaded<D>(x[i])), scale.inverse));
  }
}

#endif

// -- decode
// ----------------------------------------------------------------------------------------------------

template <MinifloatFormat F, DTypeCode D, bool Add>
HC_DEVICE void decode(const uint8_t* payload, uint64_t n, uint32_t size, void* to, const uint32_t* status) {
  if (*status) return;
  const uint32_t block = kMx ? kMxBlock : size;
  StorageOf<D>* out = static_cast<StorageOf<D>*>(to);
  const bool packs = packs_of_four<D>(out);
  const uint8_t* const scales = payload + sizeof(MinifloatPrefix);
  const uint8_t* const codes = payload + codes_at<kMx>(n, block);
  const uint64_t whole = in_fours<F>(codes, n) / kChunk * kChunk;
  put_rest<D, Add>(out, whole, n,
                   [&](uint64_t e) { return value_of<F>(codes, e, read_scale<kMx>(scales, e / block)); });
  for (uint64_t at = global_warp() * kChunk; at < whole; at += global_warps() * kChunk) {
    const NearBlocks near = near_blocks(at, block);
    uint32_t word[kRows];
    float scale[kRows];  // blocks are whole multiples of 8, so that four elements share one
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const uint32_t offset = row * kRow + kFour * lane_of();
      word[row] = codes_from<F>(codes + code_bytes<F>(at + offset));
      scale[row] = read_scale<kMx>(scales, near(offset));
    }
    put_chunk<D, Add, float>(out + at, packs,
                             [&](int row, float* v) { values_of<F>(word[row], scale[row], v); });
  }
}

template <MinifloatFormat F, typename T>
HC_DEVICE void sum(T* acc, uint64_t n, uint32_t size, uint32_t peers, const Messages& messages,
                   const uint32_t* status) {
  if (*status) return;
  const uint32_t block = kMx ? kMxBlock : size;
  const uint64_t scales = sizeof(MinifloatPrefix), codes = codes_at<kMx>(n, block);
  const uint64_t whole = in_fours<F>(messages.of[0] + codes, n) / kSumChunk * kSumChunk;
  sum_messages<T, float>(
      acc, whole, n, block, messages, peers,
      [&](const uint8_t* payload, uint64_t e, uint64_t b, uint32_t* word, float* scale) {
        *word = codes_from<F>(payload + codes + code_bytes<F>(e));
        *scale = read_scale<kMx>(payload + scales, b);
      },
      [](uint32_t word, float scale, float* v) { values_of<F>(word, scale, v); },
      [&](const uint8_t* payload, uint64_t e) {
        return value_of<F>(payload + codes, e, read_scale<kMx>(payload + scales, e / block));
      });
}

}  // namespace
}  // namespace hybridcomp

// `payload` is 16-byte aligned, `n` elements at `src` aligned to their size.
#define HC_ENCODE(name, F, D)                                                          \
  HC_KERNEL(hybridcomp::kThreads)                                                      \
  name(const void* src, std::uint64_t n, std::uint32_t block, std::uint8_t* payload) { \
    hybridcomp::encode<hybridcomp::F, D>(src, n, block, payload);                      \
  }
#define HC_ENCODE_ANY(name, F, D, Whole, threads)                                      \
  HC_KERNEL(threads)                                                                   \
  name(const void* src, std::uint64_t n, std::uint32_t block, std::uint8_t* payload) { \
    hybridcomp::encode_any<hybridcomp::F, D, Whole>(src, n, block, payload);           \
  }
#define HC_DECODE(name, F, D, Add)                                                   \
  HC_KERNEL(hybridcomp::kThreads)                                                    \
  name(const std::uint8_t* payload, std::uint64_t n, std::uint32_t block, void* out, \
       const std::uint32_t* status) {                                                \
    hybridcomp::decode<hybridcomp::F, D, Add>(payload, n, block, out, status);       \
  }

// Compute acc += `peers` messages with the same block size, which lie at the first of the addresses.
#define HC_SUM(name, F, T)                                                                             \
  HC_KERNEL(hybridcomp::kThreads)                                                                      \
  name(T* acc, std::uint64_t n, std::uint32_t block, std::uint32_t peers, const std::uint32_t* status, \
       HC_MESSAGES) {                                                                                  \
    const hybridcomp::Messages messages HC_THESE_MESSAGES;                                             \
    hybridcomp::sum<hybridcomp::F, T>(acc, n, block, peers, messages, status);                         \
  }

#define HC_ENCODE_E4M3(name, D) HC_ENCODE(name, kE4M3, D)
#define HC_ENCODE_E5M2(name, D) HC_ENCODE(name, kE5M2, D)
#define HC_ENCODE_E2M1(name, D) HC_ENCODE(name, kE2M1, D)
#define HC_WARP_E4M3(name, D) HC_ENCODE_ANY(name, kE4M3, D, false, hybridcomp::kThreads)
#define HC_WARP_E5M2(name, D) HC_ENCODE_ANY(name, kE5M2, D, false, hybridcomp::kThreads)
#define HC_WHOLE_E4M3(name, D) HC_ENCODE_ANY(name, kE4M3, D, true, hybridcomp::kMostThreads)
#define HC_WHOLE_E5M2(name, D) HC_ENCODE_ANY(name, kE5M2, D, true, hybridcomp::kMostThreads)

// Doubles too are computed in float, and added to double.
#define HC_EACH_DECODE(name, F)                            \
  HC_DECODE(name##_f32, F, hybridcomp::kFloat32, false)    \
  HC_DECODE(name##_f64, F, hybridcomp::kFloat64, false)    \
  HC_DECODE(name##_f16, F, hybridcomp::kFloat16, false)    \
  HC_DECODE(name##_bf16, F, hybridcomp::kBFloat16, false)  \
  HC_DECODE(name##_f32_add, F, hybridcomp::kFloat32, true) \
  HC_DECODE(name##_f64_add, F, hybridcomp::kFloat64, true)

HC_EACH_INPUT(HC_ENCODE_E4M3, encode_e4m3)
HC_EACH_INPUT(HC_ENCODE_E5M2, encode_e5m2)
HC_EACH_DECODE(decode_e4m3, kE4M3)
HC_SUM(sum_e4m3_f32, kE4M3, float)
HC_SUM(sum_e4m3_f64, kE4M3, double)
HC_EACH_DECODE(decode_e5m2, kE5M2)
HC_SUM(sum_e5m2_f32, kE5M2, float)
HC_SUM(sum_e5m2_f64, kE5M2, double)
#if HC_MX
HC_EACH_INPUT(HC_ENCODE_E2M1, encode_e2m1)
HC_EACH_DECODE(decode_e2m1, kE2M1)
HC_SUM(sum_e2m1_f32, kE2M1, float)
HC_SUM(sum_e2m1_f64, kE2M1, double)
#else
HC_EACH_INPUT(HC_WARP_E4M3, encode_warp_e4m3)
HC_EACH_INPUT(HC_WARP_E5M2, encode_warp_e5m2)
HC_EACH_INPUT(HC_WHOLE_E4M3, encode_whole_e4m3)
HC_EACH_INPUT(HC_WHOLE_E5M2, encode_whole_e5m2)
#endif
