// Helpers that the sparse codecs' kernels share. A tensor is read in tiles of 1,024 elements, a warp each.
// One pass (the filter) writes each tile's candidates, the elements whose key reaches a limit, to the tile's
// slot, in any order; later passes read the slots, and the tensor again only where a slot was too small.
#pragma once

#include "common/elements.cuh"
#include "common/table.cuh"
#include "hybridcomp/sparse.hpp"

namespace hybridcomp {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kTile = 1024;
constexpr uint32_t kBatch = 8;           // tiles whose slots a warp loads together
constexpr uint32_t kIndexBlock = 65536;  // elements that share a count in an index section
constexpr uint32_t kTilesOfBlock = kIndexBlock / kTile;
constexpr uint32_t kBins = 2048;
constexpr uint64_t kNoKey = ~uint64_t(0);
constexpr uint64_t kPrefix = 16;  // bytes before the index section: k, bytes of the index section

enum Phase : uint64_t {
  kDecided,    // all, tie and ties tell which elements are sent
  kSearching,  // the need-th largest key in [from, to) is sought
  kRefining,   // SIDCo: the candidates that reach `next` are counted
};

// State that launches hand to the next one. It is written by one thread of a grid of one block, or of a
// grid's last block.
struct Search {
  uint64_t low;         // the filter takes keys >= low
  uint64_t high;        // end of the filter's histogram
  uint64_t taken;       // number of candidates
  uint64_t everywhere;  // not 0: candidates were too few, and the whole tensor is searched
  uint64_t phase;
  uint64_t from, to, need;
  uint64_t all, tie, ties;             // sent: keys >= all, and of those == tie the first `ties`
  uint64_t count, index_bytes, bytes;  // elements sent; bytes of the index section and of the payload
  uint64_t arrived;                    // blocks of this grid that have ended
  uint64_t crc[1];                     // Work of message.cuh
  uint64_t others;                     // elements that are not finite
  uint64_t next, reached;              // a key, and the candidates that reach it
  uint64_t low_key, low_count, high_key, high_count, stage, excess;  // refine()
};
static_assert(sizeof(Search) == 25 * 8, "hybridcomp/codecs/device/sparse.py has these offsets");

// Fields of Search that tell which elements are sent.
struct Sent {
  uint64_t low, everywhere, all, tie, ties;
};
HC_DEVICE Sent sent_of(const Search* s) { return {s->low, s->everywhere, s->all, s->tie, s->ties}; }

// Type in which keys are computed: 32 bits at least.
template <typename U>
struct KeyOf {
  using Type = uint32_t;
};
template <>
struct KeyOf<uint64_t> {
  using Type = uint64_t;
};
template <typename U>
constexpr uint64_t kTop = uint64_t(1) << (8 * sizeof(U) - 1);  // above all keys
template <typename U>
HC_DEVICE typename KeyOf<U>::Type key_of(U x) {
  return static_cast<typename KeyOf<U>::Type>(x & static_cast<U>(kTop<U> - 1));
}
template <typename U>
constexpr int kPack = 16 / sizeof(U);

HC_DEVICE uint32_t lane_of() { return threadIdx.x & 31u; }
HC_DEVICE uint32_t warp_of() { return threadIdx.x / 32; }
HC_DEVICE uint32_t below_lane() { return (1u << lane_of()) - 1; }

HC_DEVICE uint64_t add64(uint64_t* at, uint64_t value) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(value));
}
HC_DEVICE uint64_t take64(uint64_t* at) {
  return atomicExch(reinterpret_cast<unsigned long long*>(at), 0ull);
}
// Read a value that other blocks wrote, for the last block.
HC_DEVICE uint64_t seen64(const uint64_t* at) {
  return __ldcg(reinterpret_cast<const unsigned long long*>(at));
}

HC_DEVICE uint64_t blocks_of(uint64_t n) { return (n + kIndexBlock - 1) / kIndexBlock; }
HC_DEVICE uint32_t block_elements(uint64_t block, uint64_t n) {
  const uint64_t left = n - block * kIndexBlock;
  return left < kIndexBlock ? static_cast<uint32_t>(left) : kIndexBlock;
}
HC_DEVICE uint32_t bitmap_bytes(uint32_t elements) { return (elements + 7) / 8; }
HC_DEVICE bool is_bitmap(uint32_t count, uint32_t m) { return 2 * count > bitmap_bytes(m); }
HC_DEVICE uint32_t section_bytes(uint32_t count, uint32_t m) {
  return is_bitmap(count, m) ? bitmap_bytes(m) : 2 * count;
}

// -- sums of warps and blocks
// --------------------------------------------------------------------------------

template <typename T>
HC_DEVICE T warp_sum(T x) {
  for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(kFullWarp, x, distance);
  return x;
}

// Return the sum over this lane and those before it.
template <typename T>
HC_DEVICE T warp_scan(T x) {
  for (unsigned int distance = 1; distance < 32; distance *= 2) {
    const T before = __shfl_up_sync(kFullWarp, x, distance);
    if (lane_of() >= distance) x += before;
  }
  return x;
}

// Return the sum over the threads before this one, in a block of kThreads; `total` gets that of all. `sums`
// is kWarps of shared memory.
HC_DEVICE unsigned long long block_scan(unsigned long long x, unsigned long long* sums,
                                        unsigned long long* total) {
  const unsigned long long scanned = warp_scan(x);
  __syncthreads();  // threads of an earlier call may still be reading
  if (lane_of() == 31) sums[warp_of()] = scanned;
  __syncthreads();
  unsigned long long before = 0, all = 0;
#pragma unroll
  for (uint32_t w = 0; w < kWarps; ++w) {
    const unsigned long long sum = sums[w];
    if (w < warp_of()) before += sum;
    all += sum;
  }
  *total = all;
  return before + scanned - x;
}

// Return true in all threads of the block that comes here last: it sees the others' earlier writes.
HC_DEVICE bool last_to_arrive(Grid grid, Search* s, uint32_t* shared) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    shared[0] = add64(&s->arrived, 1) + 1 == grid.blocks;
    if (shared[0]) take64(&s->arrived);
    __threadfence();
  }
  __syncthreads();
  return shared[0] != 0;
}

// -- tiles
// ---------------------------------------------------------------------------------------------------

template <typename U>
struct Tiles {
  const U* src;
  uint64_t n;
  U* values;         // slots: of `room` elements each
  uint16_t* places;  // the candidates' places in the tile
  uint32_t room;
  uint32_t* counts;  // candidates of a tile; they are in its slot if that has room for them
};

HC_DEVICE uint64_t tiles_of(uint64_t n) { return (n + kTile - 1) / kTile; }

// Return the element of a tile that bit `b` of a lane's mask stands for: lanes take packs of P neighbours in
// turn.
template <int P>
HC_DEVICE uint32_t place_of(uint32_t b) {
  return ((b / P) * 32 + lane_of()) * P + b % P;
}

// Find the elements of a tile of m with from <= key < from + span, as a mask of each lane; m == kTile if P >
// 1.
template <typename U, int P>
HC_DEVICE uint32_t in_range(const U* tile, uint32_t m, typename KeyOf<U>::Type from,
                            typename KeyOf<U>::Type span) {
  uint32_t mask = 0;
#pragma unroll(P == 1 ? 8 : 32 / P)
  for (uint32_t j = 0; j < 32 / P; ++j) {
    if constexpr (P == 1) {
      const uint32_t i = j * 32 + lane_of();
      const U x = tile[i < m ? i : 0];
      mask |= static_cast<uint32_t>(i < m && key_of(x) - from < span) << j;
    } else {
      const Pack<U, P> pack = *reinterpret_cast<const Pack<U, P>*>(tile + (j * 32 + lane_of()) * P);
#pragma unroll
      for (uint32_t e = 0; e < P; ++e)
        mask |= static_cast<uint32_t>(key_of(pack.of[e]) - from < span) << (j * P + e);
    }
  }
  return mask;
}

template <typename U>
HC_DEVICE uint32_t tile_elements(const Tiles<U>& t, uint64_t tile) {
  const uint64_t left = t.n - tile * kTile;
  return left < kTile ? static_cast<uint32_t>(left) : kTile;
}

// Call f(element) for elements of kBatch neighbouring tiles with from <= key < from + span: candidates or, if
// `everywhere`, all elements; and done(j) after those of each tile, once or twice. A whole warp does this;
// its lanes call f separately. The slots are loaded together, since each holds little.
template <typename U, typename F, typename Done>
HC_DEVICE void each_of_batch(const Tiles<U>& t, uint64_t first, uint32_t number, bool everywhere,
                             typename KeyOf<U>::Type from, typename KeyOf<U>::Type span, F f, Done done) {
  const uint32_t own = lane_of() < number ? t.counts[first + lane_of()] : 0;
  U loaded[kBatch];
  uint32_t here = 0;  // tiles of which this lane has an element
#pragma unroll
  for (uint32_t j = 0; j < kBatch; ++j) {
    const uint32_t count = __shfl_sync(kFullWarp, own, static_cast<int>(j));
    const bool has = !everywhere && count <= t.room && lane_of() < count;
    loaded[j] = has ? t.values[(first + j) * t.room + lane_of()] : U(0);
    here |= static_cast<uint32_t>(has) << j;
  }
#pragma unroll
  for (uint32_t j = 0; j < kBatch; ++j) {
    if ((here >> j & 1u) && key_of(loaded[j]) - from < span) f(loaded[j]);
    done(j);
  }
#pragma unroll 1
  for (uint32_t j = 0; j < number; ++j) {  // tiles with more than an element per lane
    const uint32_t count = __shfl_sync(kFullWarp, own, static_cast<int>(j));
    const uint64_t tile = first + j;
    if (!everywhere && count <= t.room) {
#pragma unroll 1
      for (uint32_t i = lane_of() + 32; i < count; i += 32) {
        const U x = t.values[tile * t.room + i];
        if (key_of(x) - from < span) f(x);
      }
    } else {
      const U* const elements = t.src + tile * kTile;
      const uint32_t m = tile_elements(t, tile);
      const bool packs = m == kTile && aligned_to(t.src, 16);
      const uint32_t mask =
          packs ? in_range<U, kPack<U>>(elements, m, from, span) : in_range<U, 1>(elements, m, from, span);
#pragma unroll 1
      for (uint32_t left = mask; left; left &= left - 1) {
        const uint32_t b = static_cast<uint32_t>(__ffs(static_cast<int>(left)) - 1);
        f(elements[packs ? place_of<kPack<U>>(b) : place_of<1>(b)]);
      }
    }
    done(j);
    __syncwarp();
  }
}

// The same for all tiles, by a grid.
template <typename U, typename F>
HC_DEVICE void each_candidate(Grid grid, const Tiles<U>& t, bool everywhere, typename KeyOf<U>::Type from,
                              typename KeyOf<U>::Type span, F f) {
  const uint64_t tiles = tiles_of(t.n), warps = grid.threads() / 32;
  for (uint64_t first = grid.thread() / 32 * kBatch; first < tiles; first += warps * kBatch) {
    const uint64_t left = tiles - first;
    const uint32_t number = left < kBatch ? static_cast<uint32_t>(left) : kBatch;
    each_of_batch(t, first, number, everywhere, from, span, f, [](uint32_t) {});
  }
}

// -- elements at any address
// ---------------------------------------------------------------------------------

template <typename U>
HC_DEVICE U load_any(const uint8_t* p) {
  if (aligned_to(p, sizeof(U))) return *reinterpret_cast<const U*>(p);
  U x = 0;
#pragma unroll
  for (uint32_t i = 0; i < sizeof(U); ++i) x = static_cast<U>(x | static_cast<U>(p[i]) << (8 * i));
  return x;
}
template <typename U>
HC_DEVICE void store_any(uint8_t* p, U x) {
  if (aligned_to(p, sizeof(U))) {
    *reinterpret_cast<U*>(p) = x;
    return;
  }
#pragma unroll
  for (uint32_t i = 0; i < sizeof(U); ++i) p[i] = static_cast<uint8_t>(x >> (8 * i));
}

// -- limits
// --------------------------------------------------------------------------------------------------

// Do least_key by a whole warp, which looks at 32 keys at a time.
HC_DEVICE uint64_t least_key_of_warp(double limit, DTypeCode dtype) {
  const KeyFormat format = key_format(dtype);
  const uint64_t bits = bits_of(limit);
  uint64_t low = 0, high = format.inf;  // infinity's key if no number reaches the limit
  while (low < high) {
    const uint64_t span = high - low, step = span < 32 ? 1 : span / 32;
    const uint64_t probe = low + step * lane_of();
    const bool reached = probe >= high || bits_of(key_value(probe, format)) >= bits;
    const uint32_t votes = __ballot_sync(kFullWarp, reached);
    const uint32_t first = votes ? static_cast<uint32_t>(__ffs(static_cast<int>(votes)) - 1) : 32;
    const uint64_t end = low + step * first;
    if (first < 32 && end < high) high = end;
    if (first) low += step * (first - 1) + 1;
  }
  return low;
}

// Decide that all elements with key >= `key` are sent.
HC_DEVICE void decide(Search* s, uint64_t key) {
  s->all = key;
  s->ties = 0;
  s->phase = kDecided;
}

template <DTypeCode D>
HC_DEVICE typename Real<ComputeOf<D>>::Bits finite_key(StorageOf<D> x, uint32_t* others) {
  const auto key = magnitude(loaded<D>(x));
  const bool finite = key < Real<ComputeOf<D>>::kInfinity;
  *others += !finite;
  return finite ? key : 0;
}

HC_DEVICE void add_others(uint32_t others, Search* s) {
  others = warp_sum(others);
  if (lane_of() == 0 && others) add64(&s->others, others);
}

}  // namespace hybridcomp

// EACH(suffix, U) for elements of 16, 32 and 64 bits.
#define HC_EACH_SIZE(EACH) \
  EACH(16, std::uint16_t)  \
  EACH(32, std::uint32_t)  \
  EACH(64, std::uint64_t)
