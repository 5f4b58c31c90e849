// Reading of sparse codecs' messages into the tensor: the index sections are checked, then zeros and values
// of one message are written in one pass, or those of any number of messages added.
#include "sparse/sparse.cuh"

namespace hybridcomp {
namespace {

constexpr uint32_t kEach = 4;  // index blocks of a thread at a time, in sums over index blocks
constexpr uint64_t kOwn =
    ~uint64_t(0);  // in the place of a length that this device has written in the prefix

// A message whose elements are read, in the device's memory.
struct Reading {
  const uint8_t* payload;
  const uint8_t* values;     // the elements sent, one after another
  const uint64_t* firsts;    // of each index block: elements sent of the blocks before it
  const uint64_t* sections;  // of each index block: bytes of the sections before its own
  uint32_t* starts;          // of each tile: elements sent of its index block's tiles before it
};
static_assert(sizeof(Reading) == 5 * 8, "hybridcomp/codecs/device/sparse.py has this size");

HC_DEVICE uint32_t count_of(const uint8_t* payload, uint64_t block) {
  return reinterpret_cast<const uint32_t*>(payload + kPrefix)[block];
}

// Return word `i` of a bitmap of `bytes`, which may begin at any even address.
HC_DEVICE uint32_t bitmap_word(const uint8_t* bitmap, uint32_t i, uint32_t bytes) {
  const uint32_t at = 4 * i;
  if (at + 4 <= bytes) {
    const uint16_t* const halves = reinterpret_cast<const uint16_t*>(bitmap + at);
    return halves[0] | static_cast<uint32_t>(halves[1]) << 16;
  }
  uint32_t word = 0;
  for (uint32_t b = 0; at + b < bytes; ++b) word |= static_cast<uint32_t>(bitmap[at + b]) << (8 * b);
  return word;
}

// -- checks
// --------------------------------------------------------------------------------------------------

// Check that the entries of a list are ascending and less than m; `starts` gets the first entry of each tile.
HC_DEVICE void check_list(const uint16_t* list, uint32_t count, uint32_t m, uint32_t* starts,
                          uint32_t* status) {
  for (uint32_t i = threadIdx.x; i <= count; i += kThreads) {
    const uint32_t previous = i ? list[i - 1] : 0, entry = i < count ? list[i] : kIndexBlock;
    if (i && entry <= previous) fail(status, kBadIndexOrder);
    if (i < count && entry >= m) fail(status, kBadIndexRange);
    // Set the starts of tiles that begin after the previous entry and not after this one; atomically, since
    // the entries may be wrong.
    const uint32_t last = i < count ? entry / kTile : kTilesOfBlock - 1;
    for (uint32_t tile = i ? previous / kTile + 1 : 0; tile <= last; ++tile) atomicExch(&starts[tile], i);
  }
}

// Check that a bitmap has `count` bits, none past its m elements.
HC_DEVICE void check_bitmap(const uint8_t* bitmap, uint32_t count, uint32_t m, uint32_t* starts,
                            uint32_t* shared, uint32_t* status) {
  const uint32_t bytes = bitmap_bytes(m);
  if (threadIdx.x == 0 && m % 8 && bitmap[m / 8] >> (m % 8)) fail(status, kBadIndexRange);
  for (uint32_t tile = warp_of(); tile < kTilesOfBlock; tile += kWarps) {
    const uint32_t bits = warp_sum(__popc(bitmap_word(bitmap, tile * 32 + lane_of(), bytes)));
    if (lane_of() == 0) shared[tile] = bits;
  }
  __syncthreads();
  if (threadIdx.x < 32) {  // two tiles of each lane
    const uint32_t a = shared[2 * threadIdx.x], b = shared[2 * threadIdx.x + 1];
    const uint32_t after = warp_scan(a + b);
    starts[2 * threadIdx.x] = after - a - b;
    starts[2 * threadIdx.x + 1] = after - b;
    if (threadIdx.x == 31 && after != count) fail(status, kBadBitmap);
  }
  __syncthreads();
}

// -- values
// --------------------------------------------------------------------------------------------------

template <typename T>
struct BitsOf {
  using Type = T;
};
template <>
struct BitsOf<float> {
  using Type = uint32_t;
};
template <>
struct BitsOf<double> {
  using Type = uint64_t;
};

// Write a value to its place, or add it: T is then float or double.
template <typename T, bool Add>
HC_DEVICE void put_value(T* place, typename BitsOf<T>::Type value) {
  if constexpr (Add)
    add_to(place, float_of(value));
  else
    *place = value;
}

template <typename T>
HC_DEVICE void zero_tile(T* out, uint32_t m) {
  if (m == kTile && aligned_to(out, 16)) {
#pragma unroll
    for (uint32_t j = 0; j < kTile * sizeof(T) / 512; ++j)
      reinterpret_cast<uint4*>(out)[j * 32 + lane_of()] = uint4{0, 0, 0, 0};
  } else {
    for (uint32_t i = lane_of(); i < m; i += 32) out[i] = T(0);
  }
}

template <typename T, bool Add>
HC_DEVICE void read_list(const uint16_t* list, uint32_t begin, uint32_t end, const uint8_t* values, T* block,
                         T* tile, uint32_t m) {
  using U = typename BitsOf<T>::Type;
  // The first 32 values are loaded before the zeros are written: most tiles have no more.
  uint32_t i = begin + lane_of();
  uint32_t place = 0;
  U value = 0;
  if (i < end) {
    place = list[i];
    value = load_any<U>(values + uint64_t(i) * sizeof(U));
  }
  if constexpr (!Add) {
    zero_tile(tile, m);
    __syncwarp();
  }
  while (i < end) {
    put_value<T, Add>(block + place, value);
    i += 32;
    if (i >= end) break;
    place = list[i];
    value = load_any<U>(values + uint64_t(i) * sizeof(U));
  }
}

template <typename T, bool Add>
HC_DEVICE void read_bitmap(const uint8_t* bitmap, uint32_t tile_in_block, uint32_t bytes, uint32_t begin,
                           const uint8_t* values, T* tile, uint32_t m) {
  using U = typename BitsOf<T>::Type;
  const uint32_t word = bitmap_word(bitmap, tile_in_block * 32 + lane_of(), bytes);
  const uint32_t own = static_cast<uint32_t>(__popc(word)), before = begin + warp_scan(own) - own;
#pragma unroll 8
  for (uint32_t j = 0; j < 32; ++j) {
    const uint32_t i = j * 32 + lane_of();
    const uint32_t bits = __shfl_sync(kFullWarp, word, static_cast<int>(j));
    const uint32_t first = __shfl_sync(kFullWarp, before, static_cast<int>(j));
    const bool set = (bits >> lane_of()) & 1u;
    if (i >= m || (Add && !set)) continue;
    const uint64_t rank = first + static_cast<uint32_t>(__popc(bits & below_lane()));
    put_value<T, Add>(tile + i, set ? load_any<U>(values + rank * sizeof(U)) : U(0));
  }
}

// Write or add a tile's values, which are elements of T. By a warp.
template <typename T, bool Add>
HC_DEVICE void read_tile(const Reading& r, uint64_t tile, uint64_t n, T* out) {
  using U = typename BitsOf<T>::Type;
  const uint64_t block = tile / kTilesOfBlock;
  const uint32_t i = static_cast<uint32_t>(tile % kTilesOfBlock);
  const uint32_t count = count_of(r.payload, block), m = block_elements(block, n);
  const uint32_t begin = r.starts[tile], left = m - i * kTile, part = left < kTile ? left : kTile;
  const uint8_t* const section = r.payload + kPrefix + 4 * blocks_of(n) + r.sections[block];
  const uint8_t* const first = r.values + r.firsts[block] * sizeof(U);
  T* const to = out + block * kIndexBlock;
  if (is_bitmap(count, m)) {
    read_bitmap<T, Add>(section, i, bitmap_bytes(m), begin, first, to + i * kTile, part);
  } else {
    const uint32_t end = i + 1 < kTilesOfBlock ? r.starts[tile + 1] : count;
    read_list<T, Add>(reinterpret_cast<const uint16_t*>(section), begin, end, first, to, to + i * kTile,
                      part);
  }
}

// Write the values of one message, or add those of several in their order; `status` is zero only if all
// sections were found right.
template <typename T, bool Add>
HC_DEVICE void scatter(Grid grid, const void* readings, uint32_t messages, uint64_t n, T* out,
                       const uint32_t* status) {
  if (*status) return;
  const Reading* const each = static_cast<const Reading*>(readings);
  const uint64_t tiles = tiles_of(n);
  for (uint64_t tile = grid.thread() / 32; tile < tiles; tile += grid.threads() / 32) {
#pragma unroll 1
    for (uint32_t message = 0; message < messages; ++message) {
      read_tile<T, Add>(each[message], tile, n, out);
      __syncwarp();  // another lane may add the next message's value to the same element
    }
  }
}

// Return the status to all threads. One reads it, since other blocks may find a fault while this one begins.
HC_DEVICE bool is_damaged(uint32_t* status, uint32_t* shared) {
  if (threadIdx.x == 0) shared[0] = atomicOr(reinterpret_cast<unsigned int*>(status), 0u);
  __syncthreads();
  return shared[0] != 0;
}

HC_DEVICE void find_sections(Grid, const uint8_t* payload, uint64_t n, uint64_t k, uint64_t bytes,
                             const uint8_t* values_at, uint64_t* firsts, uint64_t* sections, uint32_t* starts,
                             void* reading, uint32_t* status) {
  HC_SHARED(unsigned long long, sums, kWarps);
  HC_SHARED(uint32_t, damaged, 1);
  if (is_damaged(status, damaged)) return;
  if (bytes == kOwn) {
    k = reinterpret_cast<const uint64_t*>(payload)[0];
    bytes = reinterpret_cast<const uint64_t*>(payload)[1];
  }
  const uint64_t number = blocks_of(n);
  uint64_t values = 0, need = 0;
  for (uint64_t start = 0; start < number; start += kThreads * kEach) {
    const uint64_t first = start + threadIdx.x * kEach;
    uint64_t each[kEach], own = 0;  // elements, and bytes in the upper half: neither reaches 2^32 here
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      each[i] = 0;
      if (first + i >= number) continue;
      const uint32_t m = block_elements(first + i, n), count = count_of(payload, first + i);
      if (count > m)
        fail(status, kBadIndexCount);
      else
        each[i] = count | static_cast<uint64_t>(section_bytes(count, m)) << 32;
      own += each[i];
    }
    unsigned long long total;
    uint64_t at = block_scan(own, sums, &total);
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      if (first + i >= number) continue;
      firsts[first + i] = values + (at & 0xFFFFFFFFu);
      sections[first + i] = need + (at >> 32);
      at += each[i];
    }
    values += total & 0xFFFFFFFFu;
    need += total >> 32;
  }
  if (threadIdx.x) return;
  if (values != k) fail(status, kBadIndexCount);
  if (need + 4 * number != bytes) fail(status, kBadLength);
  if (!values_at) values_at = payload + kPrefix + bytes + sizeof(Header);
  *static_cast<Reading*>(reading) = {payload, values_at, firsts, sections, starts};
}

HC_DEVICE void check_sections(Grid grid, uint64_t n, const void* reading, uint32_t* status) {
  HC_SHARED(uint32_t, shared, kTilesOfBlock);
  HC_SHARED(uint32_t, damaged, 1);
  if (is_damaged(status, damaged)) return;
  const Reading r = *static_cast<const Reading*>(reading);
  const uint64_t number = blocks_of(n);
  for (uint64_t block = grid.block; block < number; block += grid.blocks) {
    const uint32_t count = count_of(r.payload, block), m = block_elements(block, n);
    const uint8_t* const section = r.payload + kPrefix + 4 * number + r.sections[block];
    uint32_t* const first = r.starts + block * kTilesOfBlock;
    if (is_bitmap(count, m))
      check_bitmap(section, count, m, first, shared, status);
    else
      check_list(reinterpret_cast<const uint16_t*>(section), count, m, first, status);
  }
}

}  // namespace

// Find the starts of each index block's values and section, if the section's lengths are right: `k` values in
// `bytes`, or as many as the prefix says if they are kOwn; write to `reading` where the next kernels find the
// message. The values are at `values`, or, if that is null, behind the index section and the header of their
// message. One block.
HC_KERNEL(kThreads)
sparse_sections(const uint8_t* payload, uint64_t n, uint64_t k, uint64_t bytes, const uint8_t* values,
                uint64_t* firsts, uint64_t* sections, uint32_t* starts, void* reading, uint32_t* status) {
  find_sections(whole_grid(), payload, n, k, bytes, values, firsts, sections, starts, reading, status);
}
HC_TABLE_FORM(kThreads, sparse_sections, find_sections)

// Check each block's indices, and find for each tile how many of its index block's lie before it.
HC_KERNEL(kThreads)
sparse_check(uint64_t n, const void* reading, uint32_t* status) {
  check_sections(whole_grid(), n, reading, status);
}
HC_TABLE_FORM(kThreads, sparse_check, check_sections)

}  // namespace hybridcomp

// `readings` has so many messages; of a _scatter it is one.
#define HC_SCATTER(name, T, Add)                                                                             \
  HC_KERNEL(hybridcomp::kThreads)                                                                            \
  name(const void* readings, std::uint32_t messages, std::uint64_t n, T* out, const std::uint32_t* status) { \
    hybridcomp::scatter<T, Add>(hybridcomp::whole_grid(), readings, messages, n, out, status);               \
  }                                                                                                          \
  HC_TABLE_FORM(hybridcomp::kThreads, name, hybridcomp::scatter<T, Add>)
HC_SCATTER(sparse_scatter_16, std::uint16_t, false)
HC_SCATTER(sparse_scatter_32, std::uint32_t, false)
HC_SCATTER(sparse_scatter_64, std::uint64_t, false)
HC_SCATTER(sparse_add_32, float, true)
HC_SCATTER(sparse_add_64, double, true)
