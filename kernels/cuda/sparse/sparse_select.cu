// The k elements of largest magnitude. A sample gives a range of keys in which the k-th nearly always lies;
// the filter takes the elements that reach its lower end and counts those in it by their higher digits;
// passes over the candidates count the digits that are left. Where the sample misled, passes over the tensor
// do this.
#include "sparse/sparse.cuh"

namespace hybridcomp {
namespace {

constexpr int kSampleThreads = 1024;
constexpr int kSampleEach = 16;

// Return the bits by which keys of [from, to) are shifted to give their bin.
HC_DEVICE int shift_of(uint64_t from, uint64_t to) {
  const uint64_t span = to - from;
  return span <= kBins ? 0 : 64 - __clzll(static_cast<long long>(span - 1)) - 11;
}

// Narrow the range to the need-th largest key's bin, by the block that came last. The last bin counts keys
// above the range, up to `top`. Empties the histogram.
HC_DEVICE void narrow(Search* s, uint64_t* histogram, uint64_t top, bool zeros, unsigned long long* sums) {
  constexpr uint32_t kEach = kBins / kThreads;
  const uint64_t from = s->from, to = s->to, need = s->need;
  const int shift = shift_of(from, to);
  unsigned long long counts[kEach + 1], own = 0;
  const uint32_t last =
      kBins - threadIdx.x * kEach;  // thread 0 has the largest keys; bins below `last` are its
  counts[0] = threadIdx.x ? 0 : seen64(histogram + kBins);
  if (threadIdx.x == 0) histogram[kBins] = 0;
#pragma unroll
  for (uint32_t i = 1; i <= kEach; ++i) {
    counts[i] = seen64(histogram + last - i);
    histogram[last - i] = 0;
  }
#pragma unroll
  for (uint32_t i = 0; i <= kEach; ++i) own += counts[i];
  unsigned long long total;
  unsigned long long above = block_scan(own, sums, &total);  // all have read the range after this
  if (above >= need || above + own < need) return;
  uint64_t bin = kBins, count = counts[0];
#pragma unroll
  for (uint32_t i = 1; i <= kEach; ++i)
    if (above + count < need) {
      above += count;
      count = counts[i];
      bin = last - i;
    }
  const uint64_t low = bin == kBins ? to : from + (bin << shift);
  const uint64_t end = low + (uint64_t(1) << shift);
  const uint64_t high = bin == kBins ? top : end < to ? end : to;
  s->from = low;
  s->to = high;
  s->need = need - above;
  if (count == need - above) {
    s->all = low || zeros ? low : 1;
    s->ties = 0;
    s->phase = kDecided;
  } else if (high - low == 1) {
    s->all = low + 1;
    s->tie = low;
    s->ties = low || zeros ? need - above : 0;
    s->phase = kDecided;
  }
}

// Add a block's counts to the grid's.
HC_DEVICE void add_bins(const uint32_t* bins, uint64_t* histogram) {
  for (uint32_t b = threadIdx.x; b <= kBins; b += blockDim.x)
    if (bins[b]) add64(histogram + b, bins[b]);
}

// Find in which of kBins bins, counted from the largest keys on, the rank-th key is (found[0]) and its rank
// in that bin (found[1]). Each of the kSampleThreads threads has two bins. `sums` is a word for each warp.
HC_DEVICE void find_rank(const uint32_t* bins, uint32_t rank, uint32_t* found, uint32_t* sums) {
  const uint32_t last = kBins - 2 * threadIdx.x, high = bins[last - 1], low = bins[last - 2];
  uint32_t above = warp_scan(high + low);
  if (lane_of() == 31) sums[warp_of()] = above;
  __syncthreads();
  const uint32_t own = sums[lane_of()], before = warp_scan(own) - own;
  above += __shfl_sync(kFullWarp, before, static_cast<int>(warp_of())) - high - low;
  if (above < rank && rank <= above + high + low) {
    const bool lower = rank > above + high;
    found[0] = lower ? last - 2 : last - 1;
    found[1] = rank - above - (lower ? high : 0);
  }
  __syncthreads();
}

// Find a key that `first` of the sample's elements reach, and one above it that `second` reach: by the higher
// two digits of the keys alone, since ignoring the rest takes only few elements more.
template <typename U>
HC_DEVICE void guess(Grid, const U* src, uint64_t n, uint32_t groups, uint32_t first, uint32_t second,
                     void* search) {
  using Key = typename KeyOf<U>::Type;
  constexpr int kBits = 8 * sizeof(U) - 1, kDigit = 11, kShift = kBits - kDigit;
  constexpr int kLeft = kShift < kDigit ? 0 : kShift - kDigit;
  constexpr Key kMask = (Key(1) << (kShift - kLeft)) - 1;
  HC_SHARED(uint32_t, bins, 2 * kBins);
  HC_SHARED(uint32_t, sums, kSampleThreads / 32);
  HC_SHARED(uint32_t, found, 4);
  Search* const s = static_cast<Search*>(search);
  const uint32_t size = groups ? groups * static_cast<uint32_t>(kGroupOfSample) : static_cast<uint32_t>(n);
  Key keys[kSampleEach];
#pragma unroll
  for (uint32_t j = 0; j < kSampleEach; ++j) {
    const uint32_t i = j * kSampleThreads + threadIdx.x;
    const uint64_t at = groups ? group_start(i / kGroupOfSample, groups, n) + i % kGroupOfSample : i;
    keys[j] = i < size ? key_of(src[at]) : static_cast<Key>(kTop<U>);  // kTop is no key
  }
  for (uint32_t b = threadIdx.x; b < kBins; b += kSampleThreads) bins[b] = 0;
  if (threadIdx.x < 4) found[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kSampleEach; ++j)
    if (keys[j] < static_cast<Key>(kTop<U>)) atomicAdd(&bins[static_cast<uint32_t>(keys[j] >> kShift)], 1u);
  __syncthreads();
  find_rank(bins, first, found, sums);
  find_rank(bins, second, found + 2, sums);
  const Key low = found[0], high = found[2];
  const uint32_t low_rank = found[1], high_rank = found[3];
  for (uint32_t b = threadIdx.x; b < 2 * kBins; b += kSampleThreads) bins[b] = 0;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kSampleEach; ++j) {
    const uint32_t digit = static_cast<uint32_t>(keys[j] >> kLeft & kMask);
    if (keys[j] >> kShift == low) atomicAdd(&bins[digit], 1u);
    if (keys[j] >> kShift == high) atomicAdd(&bins[kBins + digit], 1u);
  }
  __syncthreads();
  find_rank(bins, low_rank, found, sums);
  find_rank(bins + kBins, high_rank, found + 2, sums);
  if (threadIdx.x) return;
  s->low = first ? static_cast<uint64_t>(low) << kShift | static_cast<uint64_t>(found[0]) << kLeft : 0;
  s->high = second
                ? (static_cast<uint64_t>(high) << kShift) + ((static_cast<uint64_t>(found[2]) + 1) << kLeft)
                : kTop<U>;
}

template <typename U, bool Histogram>
HC_DEVICE uint32_t filter_tile(const Tiles<U>& t, uint64_t tile, uint32_t m, const Search& range,
                               uint32_t* bins) {
  using Key = typename KeyOf<U>::Type;
  const U* const elements = t.src + tile * kTile;
  const Key low = static_cast<Key>(range.low), high = static_cast<Key>(range.high);
  const Key span = static_cast<Key>(kTop<U> - range.low);
  const bool packs = m == kTile && aligned_to(t.src, 16);
  uint32_t mask =
      packs ? in_range<U, kPack<U>>(elements, m, low, span) : in_range<U, 1>(elements, m, low, span);
  const uint32_t own = static_cast<uint32_t>(__popc(mask)), scanned = warp_scan(own);
  const uint32_t count = __shfl_sync(kFullWarp, scanned, 31);
  const bool kept = count <= t.room;
  if (!kept && !Histogram) mask = 0;
  uint64_t at = tile * t.room + scanned - own;
  const int shift = Histogram ? shift_of(range.low, range.high) : 0;
#pragma unroll 1
  for (; mask; mask &= mask - 1) {
    const uint32_t b = static_cast<uint32_t>(__ffs(static_cast<int>(mask)) - 1);
    const uint32_t i = packs ? place_of<kPack<U>>(b) : place_of<1>(b);
    const U x = elements[i];  // still in the cache
    if (kept) {
      t.values[at] = x;
      t.places[at++] = static_cast<uint16_t>(i);
    }
    if constexpr (Histogram) {
      const Key key = key_of(x);
      atomicAdd(&bins[key < high ? static_cast<uint32_t>((key - low) >> shift) : kBins], 1u);
    }
  }
  if (lane_of() == 0) t.counts[tile] = count;
  return count;
}

// Write the candidates of all tiles to their slots. With a histogram (top-k) the last block takes the first
// step of the search for the k-th.
template <typename U, bool Histogram>
HC_DEVICE void filter(Grid grid, const Tiles<U>& t, Search* s, uint64_t* histogram, uint64_t k) {
  HC_SHARED(uint32_t, bins, Histogram ? kBins + 1 : 1);
  HC_SHARED(uint32_t, shared, 2);
  HC_SHARED(unsigned long long, sums, kWarps);
  Search range;
  range.low = s->low;
  range.high = s->high;
  if (range.low >= kTop<U>) range.low = kTop<U>;  // no element reaches it
  if constexpr (Histogram)
    for (uint32_t b = threadIdx.x; b <= kBins; b += kThreads) bins[b] = 0;
  if (threadIdx.x == 0) shared[1] = 0;
  __syncthreads();
  const uint64_t tiles = tiles_of(t.n);
  uint64_t taken = 0;
  for (uint64_t tile = grid.thread() / 32; tile < tiles; tile += grid.threads() / 32) {
    const uint32_t m = tile_elements(t, tile);
    taken += filter_tile<U, Histogram>(t, tile, m, range, bins);
  }
  if (lane_of() == 0 && taken) add64(&s->taken, taken);
  if constexpr (Histogram) {
    __syncthreads();
    add_bins(bins, histogram);
    if (!last_to_arrive(grid, s, shared)) return;
    const uint64_t reached = seen64(&s->taken);
    const bool misled = reached < k;
    if (threadIdx.x == 0) {
      s->everywhere = misled;
      s->phase = k ? kSearching : kDecided;
      s->from = misled ? 0 : range.low;
      s->to = misled ? range.low : range.high;
      s->need = misled ? k - reached : k;
      if (!k) s->all = kTop<U>;
    }
    __syncthreads();
    if (k && !misled) {
      narrow(s, histogram, kTop<U>, true, sums);
    } else {
      for (uint32_t b = threadIdx.x; b <= kBins; b += kThreads) histogram[b] = 0;
    }
  }
}

// Find one more digit of the key that is sought.
template <typename U>
HC_DEVICE void search(Grid grid, const Tiles<U>& t, Search* s, uint64_t* histogram, bool zeros) {
  using Key = typename KeyOf<U>::Type;
  HC_SHARED(uint32_t, bins, kBins + 1);
  HC_SHARED(uint32_t, shared, 1);
  HC_SHARED(unsigned long long, sums, kWarps);
  if (s->phase != kSearching) return;
  const uint64_t from = s->from, to = s->to;
  const bool everywhere = s->everywhere != 0;
  const int shift = shift_of(from, to);
  for (uint32_t b = threadIdx.x; b <= kBins; b += kThreads) bins[b] = 0;
  __syncthreads();
  each_candidate(grid, t, everywhere, static_cast<Key>(from), static_cast<Key>(to - from), [&](U x) {
    atomicAdd(&bins[static_cast<uint32_t>((key_of(x) - static_cast<Key>(from)) >> shift)], 1u);
  });
  __syncthreads();
  add_bins(bins, histogram);
  if (last_to_arrive(grid, s, shared)) narrow(s, histogram, kTop<U>, zeros, sums);
}

template <typename U>
HC_DEVICE void filter_topk(Grid grid, const U* src, uint64_t n, U* values, uint16_t* places, uint32_t room,
                           uint32_t* counts, void* search, uint64_t* histogram, uint64_t k) {
  filter<U, true>(grid, {src, n, values, places, room, counts}, static_cast<Search*>(search), histogram, k);
}

template <typename U>
HC_DEVICE void filter_reaching(Grid grid, const U* src, uint64_t n, U* values, uint16_t* places,
                               uint32_t room, uint32_t* counts, void* search) {
  filter<U, false>(grid, {src, n, values, places, room, counts}, static_cast<Search*>(search), nullptr, 0);
}

template <typename U>
HC_DEVICE void search_digit(Grid grid, const U* src, uint64_t n, U* values, uint16_t* places, uint32_t room,
                            uint32_t* counts, void* state, uint64_t* histogram, uint32_t zeros) {
  search<U>(grid, {src, n, values, places, room, counts}, static_cast<Search*>(state), histogram, zeros != 0);
}

}  // namespace
}  // namespace hybridcomp

// Find the range of keys to begin with, from the sample (`groups` of neighbours; 0: all elements, at most
// 16,384). `first` of its elements, or a few more, reach the lower end (0: it is zero), and `second`, or a
// few less, the key below the upper end (0: it is above all keys). One block.
#define HC_SAMPLE(bits, U)                                                                       \
  HC_KERNEL(hybridcomp::kSampleThreads)                                                          \
  sparse_sample_##bits(const U* src, std::uint64_t n, std::uint32_t groups, std::uint32_t first, \
                       std::uint32_t second, void* search) {                                     \
    hybridcomp::guess<U>(hybridcomp::whole_grid(), src, n, groups, first, second, search);       \
  }                                                                                              \
  HC_TABLE_FORM(hybridcomp::kSampleThreads, sparse_sample_##bits, hybridcomp::guess<U>)
HC_EACH_SIZE(HC_SAMPLE)

// Filter the candidates: _filter with the first step of top-k's search; with _reach the elements that reach
// the limit are taken, and no more is done.
#define HC_FILTER(bits, U)                                                                                   \
  HC_KERNEL(hybridcomp::kThreads)                                                                            \
  sparse_filter_##bits(const U* src, std::uint64_t n, U* values, std::uint16_t* places, std::uint32_t room,  \
                       std::uint32_t* counts, void* search, std::uint64_t* histogram, std::uint64_t k) {     \
    hybridcomp::filter_topk<U>(hybridcomp::whole_grid(), src, n, values, places, room, counts, search,       \
                               histogram, k);                                                                \
  }                                                                                                          \
  HC_TABLE_FORM(hybridcomp::kThreads, sparse_filter_##bits, hybridcomp::filter_topk<U>)                      \
  HC_KERNEL(hybridcomp::kThreads)                                                                            \
  sparse_reach_##bits(const U* src, std::uint64_t n, U* values, std::uint16_t* places, std::uint32_t room,   \
                      std::uint32_t* counts, void* search) {                                                 \
    hybridcomp::filter_reaching<U>(hybridcomp::whole_grid(), src, n, values, places, room, counts, search);  \
  }                                                                                                          \
  HC_TABLE_FORM(hybridcomp::kThreads, sparse_reach_##bits, hybridcomp::filter_reaching<U>)                   \
  HC_KERNEL(hybridcomp::kThreads)                                                                            \
  sparse_search_##bits(const U* src, std::uint64_t n, U* values, std::uint16_t* places, std::uint32_t room,  \
                       std::uint32_t* counts, void* search, std::uint64_t* histogram, std::uint32_t zeros) { \
    hybridcomp::search_digit<U>(hybridcomp::whole_grid(), src, n, values, places, room, counts, search,      \
                                histogram, zeros);                                                           \
  }                                                                                                          \
  HC_TABLE_FORM(hybridcomp::kThreads, sparse_search_##bits, hybridcomp::search_digit<U>)
HC_EACH_SIZE(HC_FILTER)
