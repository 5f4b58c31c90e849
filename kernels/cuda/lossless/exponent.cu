// Codec `exponent` (hybridcomp/exponent.hpp): a warp for each block of 256 elements. Encoding leaves blocks
// apart; their places follow from their lengths (bounded_starts), and bounded_move moves them there. Decoding
// first sums the lengths that the codes tell, and checks them.
#include "lossless/exponent.cuh"

namespace hybridcomp {
namespace {

HC_DEVICE uint64_t blocks_of(uint64_t n) { return (n + kExponentBlock - 1) / kExponentBlock; }

HC_DEVICE uint32_t elements_of(uint64_t n, uint64_t block) {
  const uint64_t left = n - block * kExponentBlock;
  return static_cast<uint32_t>(left < kExponentBlock ? left : kExponentBlock);
}

template <DTypeCode D>
HC_DEVICE void encode(const void* src, uint64_t n, uint8_t* codes, uint8_t* scratch, uint32_t* sums) {
  const auto* words = static_cast<const ExponentWordOf<D>*>(src);
  const uint64_t blocks = blocks_of(n), warps = global_threads() / 32;
  for (uint64_t block = global_thread() / 32; block < blocks; block += warps) {
    const uint32_t m = elements_of(n, block);
    const uint8_t code = encode_block<D>(words + block * kExponentBlock, m,
                                         scratch + block * kExponentBlock * exponent_width(D));
    if (exponent_lane() == 0) {
      codes[block] = code;
      sums[block] = static_cast<uint32_t>(exponent_block_bytes(code, m, D));
    }
  }
}

template <DTypeCode D, bool Add>
HC_DEVICE void decode(const uint8_t* payload, const uint64_t* starts, uint64_t n, void* out,
                      uint32_t* status) {
  using Word = ExponentWordOf<D>;
  if (stopped(status)) return;
  const uint64_t blocks = blocks_of(n), warps = global_threads() / 32;
  for (uint64_t block = global_thread() / 32; block < blocks; block += warps) {
    Word words[kExponentEach];
    const uint32_t m = elements_of(n, block);
    if (!decode_block<D>(payload[block], payload + starts[block], m, words)) {
      if (exponent_lane() == 0) fail(status, kBadEscapes);
      continue;
    }
#pragma unroll
    for (int k = 0; k < kExponentEach; ++k) {
      const uint32_t i = 32 * k + exponent_lane();
      if (i >= m) continue;
      const uint64_t at = block * kExponentBlock + i;
      if constexpr (!Add)
        static_cast<Word*>(out)[at] = words[k];
      else if constexpr (D == kFloat32 || D == kFloat64)
        add_to(static_cast<ComputeOf<D>*>(out) + at, float_of(words[k]));
      else
        add_to(static_cast<ComputeOf<D>*>(out) + at, loaded<D>(words[k]));
    }
  }
}

}  // namespace

// Find the length of each block's data from its code.
HC_KERNEL(kExponentThreads)
exponent_sums(const uint8_t* codes, uint64_t n, uint32_t dtype, uint32_t* sums, uint32_t* status) {
  if (stopped(status)) return;
  const uint64_t blocks = blocks_of(n);
  for (uint64_t block = global_thread(); block < blocks; block += global_threads()) {
    const size_t bytes =
        exponent_block_bytes(codes[block], elements_of(n, block), static_cast<DTypeCode>(dtype));
    if (bytes == kExponentNone) fail(status, kBadExponentCode);
    sums[block] = bytes == kExponentNone ? 0 : static_cast<uint32_t>(bytes);
  }
}

}  // namespace hybridcomp

#define HC_EXPONENT(suffix, D)                                                                           \
  HC_KERNEL(hybridcomp::kExponentThreads)                                                                \
  exponent_encode_##suffix(const void* src, std::uint64_t n, std::uint8_t* codes, std::uint8_t* scratch, \
                           std::uint32_t* sums) {                                                        \
    hybridcomp::encode<D>(src, n, codes, scratch, sums);                                                 \
  }                                                                                                      \
  HC_KERNEL(hybridcomp::kExponentThreads)                                                                \
  exponent_decode_##suffix(const std::uint8_t* payload, const std::uint64_t* starts, std::uint64_t n,    \
                           void* out, std::uint32_t* status) {                                           \
    hybridcomp::decode<D, false>(payload, starts, n, out, status);                                       \
  }                                                                                                      \
  HC_KERNEL(hybridcomp::kExponentThreads)                                                                \
  exponent_add_##suffix(const std::uint8_t* payload, const std::uint64_t* starts, std::uint64_t n,       \
                        void* out, std::uint32_t* status) {                                              \
    hybridcomp::decode<D, true>(payload, starts, n, out, status);                                        \
  }
HC_EXPONENT(f32, hybridcomp::kFloat32)
HC_EXPONENT(f64, hybridcomp::kFloat64)
HC_EXPONENT(f16, hybridcomp::kFloat16)
HC_EXPONENT(bf16, hybridcomp::kBFloat16)
