// zfp's fixed-rate streams of one dimension (codec `zfp`): a thread codes a block of four values. Blocks of
// 32 or 64 bits are a word of their own; others share words with their neighbours and are put together in
// shared memory, 64 of them at a time, which fill whole 64-bit words at every rate.
#include "zfp/zfp.cuh"

namespace hybridcomp {
namespace {

constexpr int kThreads = 256;
constexpr uint32_t kUnit = 64;       // blocks put together at a time
constexpr uint64_t kPrefixWord = 1;  // 64-bit words of the payload's prefix

HC_DEVICE uint64_t blocks_in(uint64_t n) { return n / 4 + (n % 4 != 0); }

template <DTypeCode D>
HC_DEVICE void load_block(const StorageOf<D>* src, uint64_t n, uint64_t block, bool packs,
                          ComputeOf<D> v[4]) {
  const StorageOf<D>* const from = src + block * 4;
  if (n - block * 4 >= 4) {
    if (packs) {
      load_pack<D, 4>(from, v);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = loaded<D>(from[i]);
    }
    return;
  }
  const uint64_t m = n - block * 4;  // a partial block is filled as zfp does
  v[0] = loaded<D>(from[0]);
  v[1] = m > 1 ? loaded<D>(from[1]) : v[0];
  v[2] = m > 2 ? loaded<D>(from[2]) : v[1];
  v[3] = v[0];
}

template <DTypeCode O, bool Add, typename T>
HC_DEVICE void store_block(StorageOf<O>* out, uint64_t n, uint64_t block, bool packs, const T v[4]) {
  StorageOf<O>* const to = out + block * 4;
  const uint64_t m = n - block * 4;
  if (m >= 4 && packs) {
    put_pack<O, Add, 4>(to, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (static_cast<uint64_t>(i) < m) put<O, Add>(to + i, v[i]);
}

template <DTypeCode D>
HC_DEVICE bool packs_four(const void* p) {
  return aligned_to(p, sizeof(StorageOf<D>) * 4 < 16 ? sizeof(StorageOf<D>) * 4 : 16);
}

HC_DEVICE void write_prefix(uint64_t* payload, uint32_t bits) {
  if (global_thread() == 0) payload[0] = bits;
}

// Encode blocks of as many bits as W has. The last 64-bit word's other half, if there is one, is zero.
template <DTypeCode D, typename W>
HC_DEVICE void encode_words(const void* from, uint64_t* payload, uint64_t n, const uint32_t* codes) {
  const StorageOf<D>* const src = static_cast<const StorageOf<D>*>(from);
  W* const words = reinterpret_cast<W*>(payload + kPrefixWord);
  const bool packs = packs_four<D>(src);
  const uint64_t blocks = blocks_in(n);
  for (uint64_t block = global_thread(); block < blocks; block += global_threads()) {
    ComputeOf<D> v[4];
    load_block<D>(src, n, block, packs, v);
    WordWriter<W> out;
    zfp_encode(v, codes, out);
    words[block] = out.word;
    if (sizeof(W) == 4 && block + 1 == blocks && blocks % 2) words[blocks] = 0;
  }
  write_prefix(payload, 8 * sizeof(W));
}

template <DTypeCode D>
HC_DEVICE void encode_any(const void* from, uint64_t* payload, uint64_t n, uint32_t bits,
                          const uint32_t* codes, uint64_t* stages) {
  const StorageOf<D>* const src = static_cast<const StorageOf<D>*>(from);
  uint64_t* const words = payload + kPrefixWord;
  const bool packs = packs_four<D>(src);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = kThreads / 32;
  uint64_t* const stage = stages + warp * bits;
  const uint64_t blocks = blocks_in(n), units = (blocks + kUnit - 1) / kUnit;
  const uint64_t all_words = (blocks % kUnit * bits + 63) / 64 + blocks / kUnit * bits;
  for (uint32_t i = lane; i < bits; i += 32) stage[i] = 0;
  __syncwarp();
  for (uint64_t unit = blockIdx.x * static_cast<uint64_t>(warps) + warp; unit < units;
       unit += static_cast<uint64_t>(gridDim.x) * warps) {
    for (uint32_t own = lane; own < kUnit; own += 32) {
      const uint64_t block = unit * kUnit + own;
      if (block >= blocks) break;
      ComputeOf<D> v[4];
      load_block<D>(src, n, block, packs, v);
      StageWriter out(reinterpret_cast<uint32_t*>(stage), own * bits, bits);
      zfp_encode(v, codes, out);
    }
    __syncwarp();
    const uint64_t begin = unit * bits;
    for (uint32_t i = lane; i < bits; i += 32) {
      if (begin + i < all_words) words[begin + i] = stage[i];
      stage[i] = 0;
    }
    __syncwarp();
  }
  write_prefix(payload, bits);
}

template <typename T, DTypeCode O, bool Add, typename W>
HC_DEVICE void decode_words(const uint64_t* payload, void* to, uint64_t n, const uint32_t* planes) {
  const W* const words = reinterpret_cast<const W*>(payload + kPrefixWord);
  StorageOf<O>* const out = static_cast<StorageOf<O>*>(to);
  const bool packs = packs_four<O>(out);
  const uint64_t blocks = blocks_in(n);
  for (uint64_t block = global_thread(); block < blocks; block += global_threads()) {
    WordReader<W> in{words[block]};
    T v[4];
    zfp_decode(in, 8 * sizeof(W), planes, v);
    store_block<O, Add>(out, n, block, packs, v);
  }
}

template <typename T, DTypeCode O, bool Add>
HC_DEVICE void decode_any(const uint64_t* payload, void* to, uint64_t n, uint32_t bits,
                          const uint32_t* planes) {
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(payload + kPrefixWord);
  StorageOf<O>* const out = static_cast<StorageOf<O>*>(to);
  const bool packs = packs_four<O>(out);
  const uint64_t blocks = blocks_in(n);
  const uint64_t all_words = blocks / kUnit * bits * 2 + (blocks % kUnit * bits + 63) / 64 * 2;
  for (uint64_t block = global_thread(); block < blocks; block += global_threads()) {
    StreamReader in(words, all_words, block * bits, bits);
    T v[4];
    zfp_decode(in, bits, planes, v);
    store_block<O, Add>(out, n, block, packs, v);
  }
}

}  // namespace
}  // namespace hybridcomp

// `bits` is the bits of a block; 32 and 64 have kernels of their own, which do not read it.
#define HC_ZFP_ENCODE_WORDS(name, D, W)                                           \
  HC_KERNEL(hybridcomp::kThreads)                                                 \
  name(const void* src, std::uint64_t* payload, std::uint64_t n, std::uint32_t) { \
    HC_SHARED(std::uint32_t, codes, hybridcomp::kCodes);                          \
    hybridcomp::zfp_fill_codes(codes);                                            \
    hybridcomp::encode_words<D, W>(src, payload, n, codes);                       \
  }
#define HC_ZFP_ENCODE(name, D)                                                         \
  HC_KERNEL(hybridcomp::kThreads)                                                      \
  name(const void* src, std::uint64_t* payload, std::uint64_t n, std::uint32_t bits) { \
    HC_SHARED(std::uint32_t, codes, hybridcomp::kCodes);                               \
    HC_DYNAMIC_SHARED(std::uint64_t, stages);                                          \
    hybridcomp::zfp_fill_codes(codes);                                                 \
    hybridcomp::encode_any<D>(src, payload, n, bits, codes, stages);                   \
  }                                                                                    \
  HC_ZFP_ENCODE_WORDS(name##_32, D, std::uint32_t)                                     \
  HC_ZFP_ENCODE_WORDS(name##_64, D, std::uint64_t)
HC_EACH_INPUT(HC_ZFP_ENCODE, zfp_encode)

#define HC_ZFP_DECODE_WORDS(name, T, O, Add, W)                                 \
  HC_KERNEL(hybridcomp::kThreads)                                               \
  name(const std::uint64_t* payload, void* out, std::uint64_t n, std::uint32_t, \
       const std::uint32_t* status) {                                           \
    if (*status) return;                                                        \
    HC_SHARED(std::uint32_t, planes, hybridcomp::kPlaneCodes);                  \
    hybridcomp::zfp_fill_planes(planes);                                        \
    hybridcomp::decode_words<T, O, Add, W>(payload, out, n, planes);            \
  }
#define HC_ZFP_DECODE(name, T, O, Add)                                               \
  HC_KERNEL(hybridcomp::kThreads)                                                    \
  name(const std::uint64_t* payload, void* out, std::uint64_t n, std::uint32_t bits, \
       const std::uint32_t* status) {                                                \
    if (*status) return;                                                             \
    HC_SHARED(std::uint32_t, planes, hybridcomp::kPlaneCodes);                       \
    hybridcomp::zfp_fill_planes(planes);                                             \
    hybridcomp::decode_any<T, O, Add>(payload, out, n, bits, planes);                \
  }                                                                                  \
  HC_ZFP_DECODE_WORDS(name##_32, T, O, Add, std::uint32_t)                           \
  HC_ZFP_DECODE_WORDS(name##_64, T, O, Add, std::uint64_t)
HC_EACH_OUTPUT(HC_ZFP_DECODE, zfp_decode)
