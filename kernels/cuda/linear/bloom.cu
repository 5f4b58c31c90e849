// Bloom filters of a bitmap's elements, as the index of `sketch`: each `part` elements (a multiple of 64)
// have `bits` (a multiple of 64) of their own. Layout: hybridcomp/codecs/linear/bloom.py.
#include "common/bitmap.cuh"
#include "hybridcomp/bloom.hpp"

namespace hybridcomp {

// Set the bits of the elements in the filters, which are zero before. A thread has half a word of the bitmap.
HC_KERNEL(kBitmapThreads)
bloom_insert(const uint32_t* halves, uint64_t n, uint64_t part, uint64_t bits, uint64_t hashes, uint64_t seed,
             uint32_t* filters) {
  const BloomKeys keys = bloom_keys(seed);
  for (uint64_t w = global_thread(); w < 2 * bitmap_words(n); w += global_threads()) {
    const uint32_t first = static_cast<uint32_t>(w * 32 % part);
    uint32_t* const to = filters + w * 32 / part * (bits / 32);
    for (uint32_t half = halves[w]; half; half &= half - 1) {
      BloomProbes probes =
          bloom_probes(keys, first + static_cast<uint32_t>(__ffs(static_cast<int>(half)) - 1));
      for (uint64_t h = 0; h < hashes; ++h, probes.at += probes.step) {
        const uint32_t bit = bloom_bit(probes.at, static_cast<uint32_t>(bits));
        atomicOr(reinterpret_cast<unsigned int*>(to + bit / 32), 1u << (bit % 32));
      }
    }
  }
}

// Write the bitmap of the elements that the filters may hold. A warp has half a word; all its lanes go on to
// the end.
HC_KERNEL(kBitmapThreads)
bloom_query(const uint32_t* filters, uint64_t n, uint64_t part, uint64_t bits, uint64_t hashes, uint64_t seed,
            uint64_t* words) {
  const BloomKeys keys = bloom_keys(seed);
  uint32_t* const halves = reinterpret_cast<uint32_t*>(words);
  for (uint64_t i = global_thread(); i < bitmap_words(n) * 64; i += global_threads()) {
    const uint32_t* const from = filters + i / part * (bits / 32);
    BloomProbes probes = bloom_probes(keys, static_cast<uint32_t>(i % part));
    bool held = i < n;
    for (uint64_t h = 0; held && h < hashes; ++h, probes.at += probes.step) {
      const uint32_t bit = bloom_bit(probes.at, static_cast<uint32_t>(bits));
      held = from[bit / 32] >> (bit % 32) & 1u;
    }
    const uint32_t half = __ballot_sync(kFullWarp, held);
    if ((threadIdx.x & 31u) == 0) halves[i / 32] = half;
  }
}

}  // namespace hybridcomp
