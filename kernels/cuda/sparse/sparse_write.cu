// Writing of the elements sent, from the tensor's tiles to the message: counts, indices, values, and the
// header of the message that the values make.
#include "common/message.cuh"
#include "sparse/sparse.cuh"

namespace hybridcomp {
namespace {

constexpr uint32_t kEach = 4;           // index blocks of a thread at a time, in sums over index blocks
constexpr uint32_t kPartly = 1u << 31;  // not all of a tile's ties are sent
static_assert(kWarps * kBatch == kTilesOfBlock, "a block takes an index block, each warp a batch");

// Numbers of each index block.
struct Blocks {
  uint32_t* above;     // elements with key >= all
  uint32_t* ties;      // elements with key == tie; then those of them that are sent
  uint64_t* values;    // elements sent of the blocks before it
  uint64_t* sections;  // bytes of their sections
};

// Numbers of a tile's elements above the tie, and of its ties, of which perhaps not all are sent.
struct Chosen {
  uint32_t above, ties;
};
HC_DEVICE Chosen unpacked(uint32_t c) { return {c & 0xFFFFu, c >> 16}; }

// Find the starts of each index block's section and values; write the counts, the prefix and the payload's
// length. By one block of kThreads.
HC_DEVICE void place_blocks(const Blocks& blocks, uint64_t n, uint32_t element, uint64_t left_ties,
                            uint8_t* payload, Search* s, unsigned long long* sums) {
  const uint64_t number = blocks_of(n);
  uint64_t values = 0, bytes = 0;
  for (uint64_t start = 0; start < number; start += kThreads * kEach) {
    const uint64_t first = start + threadIdx.x * kEach;
    uint32_t above[kEach], ties[kEach], own = 0;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      above[i] = first + i < number ? __ldcg(blocks.above + first + i) : 0;
      ties[i] = first + i < number ? __ldcg(blocks.ties + first + i) : 0;
      own += ties[i];
    }
    unsigned long long total;
    uint64_t before = block_scan(own, sums, &total);
    uint64_t both = 0;  // elements, and bytes in the upper half: neither reaches 2^32 here
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint64_t left = left_ties > before ? left_ties - before : 0;
      before += ties[i];
      if (left < ties[i]) ties[i] = static_cast<uint32_t>(left);
      above[i] += ties[i];
      if (first + i >= number) continue;
      both += above[i] | static_cast<uint64_t>(section_bytes(above[i], block_elements(first + i, n))) << 32;
    }
    left_ties -= total < left_ties ? total : left_ties;
    uint64_t at = block_scan(both, sums, &total);
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      if (first + i >= number) continue;
      blocks.ties[first + i] = ties[i];
      blocks.values[first + i] = values + (at & 0xFFFFFFFFu);
      blocks.sections[first + i] = bytes + (at >> 32);
      reinterpret_cast<uint32_t*>(payload + kPrefix)[first + i] = above[i];
      at += above[i] | static_cast<uint64_t>(section_bytes(above[i], block_elements(first + i, n))) << 32;
    }
    values += total & 0xFFFFFFFFu;
    bytes += total >> 32;
  }
  if (threadIdx.x) return;
  s->count = values;
  s->index_bytes = 4 * number + bytes;
  s->bytes = kPrefix + s->index_bytes + sizeof(Header) + values * element;
  reinterpret_cast<uint64_t*>(payload)[0] = values;
  reinterpret_cast<uint64_t*>(payload)[1] = s->index_bytes;
}

// Count the elements sent of every tile and index block; the last block places them.
template <typename U>
HC_DEVICE void count(Grid grid, const Tiles<U>& t, uint32_t* chosen, const Blocks& blocks, uint8_t* payload,
                     Search* s) {
  using Key = typename KeyOf<U>::Type;
  HC_SHARED(uint32_t, tiles, kTilesOfBlock);  // above and ties, packed
  HC_SHARED(uint32_t, shared, 1);
  HC_SHARED(unsigned long long, sums, kWarps);
  const Sent sent = sent_of(s);
  const uint64_t number = blocks_of(t.n);
  const bool counted = !sent.everywhere && !sent.ties && sent.all == sent.low;
  const Key all = static_cast<Key>(sent.all), tie = static_cast<Key>(sent.tie), from = sent.ties ? tie : all;
  for (uint64_t block = grid.block; block < number; block += grid.blocks) {
    const uint64_t first = block * kTilesOfBlock, left = tiles_of(t.n) - first;
    const uint32_t end = left < kTilesOfBlock ? static_cast<uint32_t>(left) : kTilesOfBlock;
    if (threadIdx.x < kTilesOfBlock)
      tiles[threadIdx.x] = counted && threadIdx.x < end ? t.counts[first + threadIdx.x] : 0;
    __syncthreads();
    const uint32_t at = warp_of() * kBatch;
    if (!counted && at < end) {
      uint32_t own = 0;
      each_of_batch(
          t, first + at, end - at < kBatch ? end - at : kBatch, sent.everywhere != 0, from,
          static_cast<Key>(kTop<U> - from),
          [&](U x) {
            const Key key = key_of(x);
            own += key >= all ? 1u : key == tie ? 1u << 16 : 0u;
          },
          [&](uint32_t j) {
            if (own) atomicAdd(&tiles[at + j], own);
            own = 0;
          });
    }
    __syncthreads();
    if (threadIdx.x < end) chosen[first + threadIdx.x] = tiles[threadIdx.x];
    if (threadIdx.x < 32) {
      const uint32_t i = threadIdx.x;
      const Chosen a = unpacked(i < end ? tiles[i] : 0), b = unpacked(i + 32 < end ? tiles[i + 32] : 0);
      const uint32_t above = warp_sum(a.above + b.above), ties = warp_sum(a.ties + b.ties);
      if (threadIdx.x == 0) {
        blocks.above[block] = above;
        blocks.ties[block] = ties;
      }
    }
    __syncthreads();
  }
  if (last_to_arrive(grid, s, shared)) place_blocks(blocks, t.n, sizeof(U), sent.ties, payload, s, sums);
}

// Return the first `count` of the bits set.
HC_DEVICE uint32_t first_bits(uint32_t bits, uint32_t count) {
  if (static_cast<uint32_t>(__popc(bits)) <= count) return bits;
  uint32_t kept = 0;
  for (; count; --count, bits &= bits - 1) kept |= bits & (0u - bits);
  return kept;
}

// Return which elements of a tile are sent: bit i of a lane's word is element 32 * lane + i. `words` is 64
// words of shared memory of this warp; `ties` of the tile's ties are sent.
template <typename U>
HC_DEVICE uint32_t words_of(const Tiles<U>& t, uint64_t tile, const Sent& s, uint32_t ties, bool stored,
                            uint32_t* words) {
  using Key = typename KeyOf<U>::Type;
  const Key all = static_cast<Key>(s.all), tie = static_cast<Key>(s.tie);
  uint32_t above = 0, equal = 0;
  if (stored) {
    words[lane_of()] = words[lane_of() + 32] = 0;
    __syncwarp();
    const uint32_t count = t.counts[tile];
    for (uint32_t i = lane_of(); i < count; i += 32) {
      const Key key = key_of(t.values[tile * t.room + i]);
      const uint32_t place = t.places[tile * t.room + i];
      if (key >= all)
        atomicOr(&words[place / 32], 1u << (place % 32));
      else if (ties && key == tie)
        atomicOr(&words[place / 32 + 32], 1u << (place % 32));
    }
    __syncwarp();
    above = words[lane_of()];
    equal = words[lane_of() + 32];
    __syncwarp();
  } else {
    const uint32_t m = tile_elements(t, tile);
#pragma unroll 8
    for (uint32_t j = 0; j < 32; ++j) {
      const uint32_t i = j * 32 + lane_of();
      const Key key = i < m ? key_of(t.src[tile * kTile + i]) : 0;
      const uint32_t a = __ballot_sync(kFullWarp, i < m && key >= all);
      const uint32_t e = __ballot_sync(kFullWarp, i < m && ties && key < all && key == tie);
      if (lane_of() == j) {
        above = a;
        equal = e;
      }
    }
  }
  if (ties) {
    const uint32_t own = static_cast<uint32_t>(__popc(equal)), before = warp_scan(own) - own;
    above |= first_bits(equal, ties > before ? ties - before : 0);
  }
  return above;
}

// Write a tile's part of a list of indices, and its values.
template <typename U>
HC_DEVICE void write_list(const Tiles<U>& t, uint64_t tile, uint32_t word, bool stored, uint16_t* indices,
                          uint8_t* values) {
  const uint32_t own = static_cast<uint32_t>(__popc(word)), before = warp_scan(own) - own;
  const uint32_t first = static_cast<uint32_t>(tile % kTilesOfBlock) * kTile;
  const uint32_t count = stored ? t.counts[tile] : kTile;
  for (uint32_t start = 0; start < count; start += 32) {
    const uint32_t i = start + lane_of();
    const uint32_t place = !stored ? i : i < count ? t.places[tile * t.room + i] : 0;
    const uint32_t bits = __shfl_sync(kFullWarp, word, static_cast<int>(place / 32));
    const uint32_t rank = __shfl_sync(kFullWarp, before, static_cast<int>(place / 32)) +
                          static_cast<uint32_t>(__popc(bits & ((1u << (place % 32)) - 1)));
    if (i >= count || !((bits >> (place % 32)) & 1u)) continue;
    if (indices) indices[rank] = static_cast<uint16_t>(first + place);
    store_any<U>(values + rank * sizeof(U), stored ? t.values[tile * t.room + i] : t.src[tile * kTile + i]);
  }
}

// Find the offsets of an index block's tiles among its elements that are sent, and how many ties each sends.
// By a warp.
HC_DEVICE void place_tiles(const uint32_t* chosen, uint64_t first, uint64_t tiles, uint32_t sent,
                           uint32_t* offsets, uint32_t* quotas) {
  const uint64_t tile = first + 2 * lane_of();  // each lane has two
  const Chosen a = unpacked(tile < tiles ? chosen[tile] : 0);
  const Chosen b = unpacked(tile + 1 < tiles ? chosen[tile + 1] : 0);
  uint32_t before = warp_scan(a.ties + b.ties) - a.ties - b.ties;
  const uint32_t left = sent > before ? sent - before : 0;
  const uint32_t quota = a.ties < left ? a.ties : left;
  const uint32_t other = b.ties < left - quota ? b.ties : left - quota;
  const uint32_t own = a.above + quota, both = own + b.above + other;
  before = warp_scan(both) - both;
  offsets[2 * lane_of()] = before;
  offsets[2 * lane_of() + 1] = before + own;
  if (lane_of() == 31) offsets[kTilesOfBlock] = before + both;
  quotas[2 * lane_of()] = quota | (quota && quota < a.ties ? kPartly : 0);
  quotas[2 * lane_of() + 1] = other | (other && other < b.ties ? kPartly : 0);
}

// A lane's elements of a batch of tiles.
template <typename U>
struct Batch {
  U x[kBatch];
  uint32_t places[kBatch];
  uint32_t here;   // tiles of which the lane has an element
  uint32_t small;  // tiles that are in the lanes as a whole
};

template <typename U>
HC_DEVICE Batch<U> load_batch(const Tiles<U>& t, uint64_t first, uint64_t tiles, bool everywhere) {
  Batch<U> batch;
  batch.here = batch.small = 0;
  const uint32_t own = lane_of() < kBatch && first + lane_of() < tiles ? t.counts[first + lane_of()] : 0;
  const uint32_t most = everywhere ? 0 : t.room < 32 ? t.room : 32;
#pragma unroll
  for (uint32_t j = 0; j < kBatch; ++j) {
    const uint32_t count = __shfl_sync(kFullWarp, own, static_cast<int>(j));
    const bool small = !everywhere && count <= most, has = small && lane_of() < count;
    const uint64_t at = (first + j) * t.room + lane_of();
    batch.x[j] = has ? t.values[at] : U(0);
    batch.places[j] = has ? t.places[at] : 0;
    batch.here |= static_cast<uint32_t>(has) << j;
    batch.small |= static_cast<uint32_t>(small) << j;
  }
  return batch;
}

// Write a batch's part of a list of indices, and its values, but for tiles that send a part of their ties;
// return which tiles are left to write. `words` is 32 zeros for each tile.
template <typename U>
HC_DEVICE uint32_t write_batch(const Batch<U>& batch, const Sent& s, const uint32_t* offsets,
                               const uint32_t* quotas, uint32_t place, uint16_t* indices, uint8_t* values,
                               uint32_t* words) {
  using Key = typename KeyOf<U>::Type;
  uint32_t picked = 0, rest = 0, sums[kBatch / 4] = {};  // at most 32 of a tile: a byte is enough
#pragma unroll
  for (uint32_t j = 0; j < kBatch; ++j) {
    const bool whole = (batch.small >> j & 1u) && !(quotas[j] & kPartly);
    const Key least = static_cast<Key>(quotas[j] ? s.tie : s.all);
    const bool sent = whole && (batch.here >> j & 1u) && key_of(batch.x[j]) >= least;
    if (sent) atomicOr(&words[j * 32 + batch.places[j] / 32], 1u << (batch.places[j] % 32));
    picked |= static_cast<uint32_t>(sent) << j;
    rest |= static_cast<uint32_t>(!whole && offsets[j] < offsets[j + 1]) << j;
  }
  __syncwarp();
#pragma unroll
  for (uint32_t j = 0; j < kBatch; ++j)
    sums[j / 4] += static_cast<uint32_t>(__popc(words[j * 32 + lane_of()])) << (j % 4 * 8);
#pragma unroll
  for (uint32_t i = 0; i < kBatch / 4; ++i) sums[i] = warp_scan(sums[i]) - sums[i];
#pragma unroll
  for (uint32_t j = 0; j < kBatch; ++j) {
    const uint32_t word = batch.places[j] / 32, bit = batch.places[j] % 32;
    const uint32_t before = __shfl_sync(kFullWarp, sums[j / 4], static_cast<int>(word)) >> (j % 4 * 8) & 255u;
    if (!(picked >> j & 1u)) continue;
    const uint32_t rank =
        offsets[j] + before + static_cast<uint32_t>(__popc(words[j * 32 + word] & ((1u << bit) - 1)));
    indices[rank] = static_cast<uint16_t>(place + j * kTile + batch.places[j]);
    store_any<U>(values + uint64_t(rank) * sizeof(U), batch.x[j]);
  }
  __syncwarp();
  return rest;
}

// Write a tile's part of a bitmap, which may begin at any even address.
HC_DEVICE void write_bits(uint8_t* bitmap, uint32_t tile_in_block, uint32_t end, uint32_t word) {
  uint32_t at = tile_in_block * (kTile / 8) + lane_of() * 4;
  if (at + 4 <= end) {
    reinterpret_cast<uint16_t*>(bitmap + at)[0] = static_cast<uint16_t>(word);
    reinterpret_cast<uint16_t*>(bitmap + at)[1] = static_cast<uint16_t>(word >> 16);
  } else {
    for (; at < end; ++at, word >>= 8) bitmap[at] = static_cast<uint8_t>(word);
  }
}

// Write sections and values, an index block at a time. Values follow the index section and a header's room,
// or go to `values`.
template <typename U>
HC_DEVICE void write(Grid grid, const Tiles<U>& t, const uint32_t* chosen, const Blocks& blocks,
                     uint8_t* payload, uint8_t* values, const Search* s) {
  HC_SHARED(uint32_t, offsets, kTilesOfBlock + 1);
  HC_SHARED(uint32_t, quotas, kTilesOfBlock);
  HC_SHARED(uint32_t, words, kWarps * kBatch * 32);
  const Sent sent = sent_of(s);
  const uint64_t tiles = tiles_of(t.n), number = blocks_of(t.n);
  uint8_t* const sections = payload + kPrefix + 4 * number;
  uint32_t* const mine = words + warp_of() * kBatch * 32;
  const uint32_t at = warp_of() * kBatch;  // the warp's first tile in its index block
  if (!values) values = payload + kPrefix + s->index_bytes + sizeof(Header);
  for (uint64_t block = grid.block; block < number; block += grid.blocks) {
    const uint64_t first = block * kTilesOfBlock;
    const Batch<U> batch = load_batch(t, first + at, tiles, sent.everywhere != 0);
#pragma unroll
    for (uint32_t j = 0; j < kBatch; ++j) mine[j * 32 + lane_of()] = 0;
    if (threadIdx.x < 32) place_tiles(chosen, first, tiles, blocks.ties[block], offsets, quotas);
    __syncthreads();
    const uint32_t m = block_elements(block, t.n), total = offsets[kTilesOfBlock];
    const bool bitmap = is_bitmap(total, m);
    uint8_t* const section = sections + blocks.sections[block];
    uint16_t* const indices = reinterpret_cast<uint16_t*>(section);
    uint8_t* const to = values + blocks.values[block] * sizeof(U);
    const uint64_t left = first + at < tiles ? tiles - first - at : 0;
    uint32_t rest = left < kBatch ? (1u << left) - 1 : (1u << kBatch) - 1;
    if (!bitmap) rest = write_batch(batch, sent, offsets + at, quotas + at, at * kTile, indices, to, mine);
#pragma unroll 1
    for (; rest; rest &= rest - 1) {
      const uint32_t i = at + static_cast<uint32_t>(__ffs(static_cast<int>(rest)) - 1);
      const uint64_t tile = first + i;
      const bool stored = !sent.everywhere && t.counts[tile] <= t.room;
      const uint32_t word = words_of(t, tile, sent, quotas[i] & ~kPartly, stored, mine);
      write_list(t, tile, word, stored, bitmap ? nullptr : indices + offsets[i],
                 to + uint64_t(offsets[i]) * sizeof(U));
      if (bitmap) write_bits(section, i, bitmap_bytes(m), word);
    }
    __syncthreads();
  }
}

template <typename U>
HC_DEVICE void count_sent(Grid grid, const U* src, uint64_t n, U* values, uint16_t* places, uint32_t room,
                          uint32_t* counts, void* search, uint32_t* chosen, uint32_t* above, uint32_t* ties,
                          uint64_t* firsts, uint64_t* sections, uint8_t* payload) {
  count<U>(grid, {src, n, values, places, room, counts}, chosen, {above, ties, firsts, sections}, payload,
           static_cast<Search*>(search));
}

template <typename U>
HC_DEVICE void write_sent(Grid grid, const U* src, uint64_t n, U* values, uint16_t* places, uint32_t room,
                          uint32_t* counts, void* search, uint32_t* chosen, uint32_t* above, uint32_t* ties,
                          uint64_t* firsts, uint64_t* sections, uint8_t* payload, uint8_t* to) {
  write<U>(grid, {src, n, values, places, room, counts}, chosen, {above, ties, firsts, sections}, payload, to,
           static_cast<const Search*>(search));
}

HC_DEVICE void seal_values(Grid grid, uint8_t* payload, void* search, uint32_t dtype, uint32_t element,
                           uint32_t params) {
  HC_SHARED(CrcShared, shared, 1);
  HC_SHARED(Header, header, 1);
  Search* const s = static_cast<Search*>(search);
  const uint64_t count = s->count, size = count * element;
  uint8_t* const message = payload + kPrefix + s->index_bytes;
  const uint32_t share = crc_share(message + sizeof(Header), size, shared, grid);
  uint32_t sum;
  if (!last_block(share, reinterpret_cast<Work*>(s->crc), shared, &sum, grid)) return;
  write_header(message, {kMagic, kNoneId, static_cast<uint8_t>(dtype), 0, count, size, params, 0}, header,
               *shared, sum);
}

HC_DEVICE void place_values(Grid grid, uint8_t* payload, void* search, const uint8_t* message, uint64_t size,
                            const uint64_t* total) {
  Search* const s = static_cast<Search*>(search);
  const uint64_t bytes = total ? *total : size;
  uint8_t* const to = payload + kPrefix + s->index_bytes;
  const uint64_t whole = bytes / 4;
  for (uint64_t i = grid.thread(); i < whole; i += grid.threads())
    store_any<uint32_t>(to + 4 * i, reinterpret_cast<const uint32_t*>(message)[i]);
  if (grid.thread() >= bytes % 4) return;
  to[4 * whole + grid.thread()] = message[4 * whole + grid.thread()];
}

HC_DEVICE void set_length(Grid, void* search, uint64_t size, const uint64_t* total) {
  Search* const s = static_cast<Search*>(search);
  if (threadIdx.x == 0) s->bytes = kPrefix + s->index_bytes + (total ? *total : size);
}

}  // namespace

// Write the header of values that go as they are: a message of `none` after the index section.
HC_KERNEL(kCrcThreads)
sparse_seal(uint8_t* payload, void* search, uint32_t dtype, uint32_t element, uint32_t params) {
  seal_values(whole_grid(), payload, search, dtype, element, params);
}
HC_TABLE_FORM(kCrcThreads, sparse_seal, seal_values)

// Put the message of the values, of `size` bytes or of `*total`, after the index section.
HC_KERNEL(kThreads)
sparse_place(uint8_t* payload, void* search, const uint8_t* message, uint64_t size, const uint64_t* total) {
  place_values(whole_grid(), payload, search, message, size, total);
}
HC_TABLE_FORM(kThreads, sparse_place, place_values)

// Find the payload's length with that message.
HC_KERNEL(32)
sparse_length(void* search, uint64_t size, const uint64_t* total) {
  set_length(whole_grid(), search, size, total);
}
HC_TABLE_FORM(32, sparse_length, set_length)

}  // namespace hybridcomp

#define HC_WRITE(bits, U)                                                                                  \
  HC_KERNEL(hybridcomp::kThreads)                                                                          \
  sparse_count_##bits(const U* src, std::uint64_t n, U* values, std::uint16_t* places, std::uint32_t room, \
                      std::uint32_t* counts, void* search, std::uint32_t* chosen, std::uint32_t* above,    \
                      std::uint32_t* ties, std::uint64_t* firsts, std::uint64_t* sections,                 \
                      std::uint8_t* payload) {                                                             \
    hybridcomp::count_sent<U>(hybridcomp::whole_grid(), src, n, values, places, room, counts, search,      \
                              chosen, above, ties, firsts, sections, payload);                             \
  }                                                                                                        \
  HC_TABLE_FORM(hybridcomp::kThreads, sparse_count_##bits, hybridcomp::count_sent<U>)                      \
  HC_KERNEL(hybridcomp::kThreads)                                                                          \
  sparse_write_##bits(const U* src, std::uint64_t n, U* values, std::uint16_t* places, std::uint32_t room, \
                      std::uint32_t* counts, void* search, std::uint32_t* chosen, std::uint32_t* above,    \
                      std::uint32_t* ties, std::uint64_t* firsts, std::uint64_t* sections,                 \
                      std::uint8_t* payload, std::uint8_t* to) {                                           \
    hybridcomp::write_sent<U>(hybridcomp::whole_grid(), src, n, values, places, room, counts, search,      \
                              chosen, above, ties, firsts, sections, payload, to);                         \
  }                                                                                                        \
  HC_TABLE_FORM(hybridcomp::kThreads, sparse_write_##bits, hybridcomp::write_sent<U>)
HC_EACH_SIZE(HC_WRITE)
