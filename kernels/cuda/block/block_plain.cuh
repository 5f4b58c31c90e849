// The fast path of the block quantizers: to nearest, without offsets, blocks of 32, 64, ... 1024. A group of
// lanes takes a block, each lane Quads times four neighbours, a quarter (or an eighth) of the block apart, as
// a byte's fields lie. A warp reads and writes whole sectors at once.
#pragma once

#include "block/block_group.cuh"
#include "common/table.cuh"

namespace hybridcomp {
namespace {

constexpr int kFewThreads = 128;  // threads of a block with twice the registers

template <int Quads>
constexpr int kWords = Quads * kBits / 8;  // 32-bit words of packed integers for Quads times four elements
constexpr uint32_t kEachField = 0x01010101u * kField;

// Places of a warp's lanes.
template <int Quads>
struct Place {
  uint32_t lanes;   // lanes of a block
  uint32_t lane;    // this lane's number among those
  uint32_t each;    // blocks of a warp at a time
  uint32_t stride;  // elements between a lane's quads
  Grid grid;

  HC_METHOD explicit Place(uint32_t block, Grid blocks = whole_grid())
      : lanes(block / (4 * Quads)),
        lane(threadIdx.x & (lanes - 1)),
        each(32 / lanes),
        stride(4 * lanes),
        grid(blocks) {}
  HC_METHOD uint64_t first() const { return grid.thread() / 32 * each; }
  HC_METHOD uint64_t step() const { return grid.threads() / 32 * each; }
  HC_METHOD uint64_t own(uint64_t b) const { return b + (threadIdx.x & 31) / lanes; }
};

// Return a byte less its bias, without a slow conversion: as the low bits of a mantissa.
template <typename T>
HC_DEVICE T exact(uint32_t byte) {
  constexpr int kBias = 1 << (kBits - 1);
  if constexpr (sizeof(T) == 4)
    return float_of(0x4B000000u | byte) - static_cast<float>(0x800000 + kBias);
  else
    return float_of(static_cast<uint64_t>(0x4330000000000000ull | byte)) - (4503599627370496.0 + kBias);
}

// Write the four signed integers of field `part` of a word's bytes.
template <typename T>
HC_DEVICE void unpack(uint32_t word, int part, T* out) {
  const uint32_t raised = ((word >> (part * kBits)) & kEachField) ^ (0x01010101u << (kBits - 1));
#pragma unroll
  for (int k = 0; k < 4; ++k) out[k] = exact<T>(__byte_perm(raised, 0, 0x4440 + k));
}

// Return the low bytes of four integers.
HC_DEVICE uint32_t low_bytes(const uint32_t* q) {
  return __byte_perm(__byte_perm(q[0], q[1], 0x0040), __byte_perm(q[2], q[3], 0x0040), 0x5410);
}

template <typename T>
HC_DEVICE typename Real<T>::Bits peak_over_lanes(typename Real<T>::Bits peak, uint32_t lanes) {
  for (uint32_t d = lanes / 2; d; d /= 2) {
    const auto other = __shfl_xor_sync(kFullWarp, peak, d);
    peak = other > peak ? other : peak;
  }
  return peak;
}

// Return word w of a lane's integers: field by field of quads w, w + kWords, ...
template <int Quads, typename T>
HC_DEVICE uint32_t word_of(const T (*x)[4], int w, T inverse) {
  uint32_t word = 0;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    uint32_t q[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      q[k] = static_cast<uint32_t>(quantized(x[w + part * kWords<Quads>][k], inverse));
    word |= (low_bytes(q) & kEachField) << (part * kBits);
  }
  return inverse == T(0) ? 0 : word;  // zero for a block that is not finite
}

template <int Quads, typename Source>
HC_DEVICE void encode_plain(Grid grid, const Source& source, const Form& form, uint64_t n, uint8_t* scales,
                            uint8_t* packed) {
  using T = typename Source::T;
  const uint32_t block = form.block;
  const Place<Quads> place(block, grid);
  const uint64_t whole = n / block;
  for (uint64_t begin = place.first(); begin < whole; begin += place.step()) {
    const uint64_t own = place.own(begin);
    const uint64_t b = own < whole ? own : whole - 1;  // so that all lanes have a block to read
    const uint64_t at = b * block + 4 * place.lane;
    T x[Quads][4];
#pragma unroll
    for (int i = 0; i < Quads; ++i) source.quad(at + i * place.stride, x[i]);
    typename Real<T>::Bits peak = 0;
#pragma unroll
    for (int i = 0; i < 4 * Quads; ++i) {
      const auto a = magnitude(x[i / 4][i % 4]);
      peak = a > peak ? a : peak;
    }
    peak = peak_over_lanes<T>(peak, place.lanes);
    const BlockScale<T> scale = block_scale<T>(peak, T(kLimit));
    if (own >= whole) continue;
    if (place.lane == 0) {
      reinterpret_cast<T*>(scales)[b] = scale.stored;
      source.see(peak);
    }
    uint32_t* const to = reinterpret_cast<uint32_t*>(packed + b * (block / kParts)) + place.lane;
#pragma unroll
    for (int w = 0; w < kWords<Quads>; ++w) {
      const uint32_t word = word_of<Quads>(x, w, scale.inverse);
      to[w * place.lanes] = word;
      if constexpr (Source::kKeeps) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int i = w + part * kWords<Quads>;
          T decoded[4];
          unpack(word, part, decoded);
#pragma unroll
          for (int k = 0; k < 4; ++k) decoded[k] *= scale.stored;
          source.keep_quad(at + i * place.stride, x[i], decoded);
        }
      }
    }
  }
  // The last warp, which has the least to do, encodes the last block if it is short.
  if (n % block && grid.thread() / 32 + 1 == grid.threads() / 32)
    encode_by_lanes(source, form, n, whole, scales, packed, threadIdx.x & 31, 32);
}

// -- decoding -------------------------------------------------------------------------------------------

// Sixteen elements of a block: groups share no data here, so blocks may have any power of two from 32 on.
struct Part {
  uint32_t shift;   // log2 of the parts of a block
  uint32_t lanes;   // parts of a block
  uint32_t stride;  // elements between a part's quads

  HC_METHOD explicit Part(uint32_t block)
      : shift(27 - static_cast<uint32_t>(__clz(static_cast<int>(block)))),
        lanes(block / 16),
        stride(block / 4) {}
  HC_METHOD uint64_t block_of(uint64_t part) const { return part >> shift; }
  HC_METHOD uint32_t lane_of(uint64_t part) const { return static_cast<uint32_t>(part) & (lanes - 1); }
};

HC_DEVICE void load_words(const uint8_t* packed, uint64_t b, uint32_t block, uint32_t lanes, uint32_t lane,
                          uint32_t* words) {
  const uint32_t* const from = reinterpret_cast<const uint32_t*>(packed + b * (block / kParts)) + lane;
#pragma unroll
  for (int w = 0; w < kWords<4>; ++w) words[w] = from[w * lanes];
}

// Decode the four values of quad i.
template <typename T>
HC_DEVICE void values_of(const uint32_t* words, int i, T scale, T* out) {
  unpack(words[i % kWords<4>], i / kWords<4>, out);
#pragma unroll
  for (int k = 0; k < 4; ++k) out[k] *= scale;
}

template <typename T, DTypeCode D, bool Add>
HC_DEVICE void decode_plain(Grid grid, const uint8_t* scales, const uint8_t* packed, uint64_t n,
                            uint32_t block, void* to, const uint32_t* status) {
  if (*status) return;
  StorageOf<D>* const out = static_cast<StorageOf<D>*>(to);
  const bool wide = takes_quads<D>(out);
  const Part part(block);
  const uint64_t whole = n / block;
  for (uint64_t i = grid.thread(); i < whole << part.shift; i += grid.threads()) {
    const uint64_t b = part.block_of(i);
    const uint32_t lane = part.lane_of(i);
    const T scale = reinterpret_cast<const T*>(scales)[b];
    uint32_t words[kWords<4>];
    load_words(packed, b, block, part.lanes, lane, words);
    StorageOf<D>* const here = out + b * block + 4 * lane;
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) {
      T values[4];
      values_of(words, quad, scale, values);
      put_quad<D, Add>(here + quad * part.stride, wide, values);
    }
  }
  const Values<T> values(scales, packed, n, block, false);
  for (uint64_t i = whole * block + grid.thread(); i < n; i += grid.threads())
    put<D, Add>(out + i, values.at(i));
}

// Messages whose values sum_plain adds to acc, one after the other, four of them read at a time. All have the
// same format and count; the integers begin `packed_at` bytes after the scales (T).
constexpr int kMostPeers = 16;
struct Messages {
  const uint8_t* scales[kMostPeers];
};

template <typename T>
HC_DEVICE void sum_plain(Grid grid, const Messages& messages, uint32_t peers, uint64_t n, uint32_t block,
                         T* acc, const uint32_t* status) {
  if (*status) return;
  constexpr DTypeCode kType = sizeof(T) == 8 ? kFloat64 : kFloat32;
  constexpr int kTogether = 4;
  const bool wide = takes_quads<kType>(acc);
  const Part part(block);
  const uint64_t whole = n / block, packed_at = (n + block - 1) / block * sizeof(T);
  for (uint64_t i = grid.thread(); i < whole << part.shift; i += grid.threads()) {
    const uint64_t b = part.block_of(i);
    const uint32_t lane = part.lane_of(i);
    T* const here = acc + b * block + 4 * lane;
    T sums[4][4];
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) load_quad<kType>(here + quad * part.stride, wide, sums[quad]);
#pragma unroll
    for (int from = 0; from < kMostPeers; from += kTogether) {
      if (static_cast<uint32_t>(from) >= peers) break;
      uint32_t words[kTogether][kWords<4>];
      T scale[kTogether];
#pragma unroll
      for (int p = 0; p < kTogether; ++p) {
        if (static_cast<uint32_t>(from + p) >= peers) continue;
        const uint8_t* const scales = messages.scales[from + p];
        scale[p] = reinterpret_cast<const T*>(scales)[b];
        load_words(scales + packed_at, b, block, part.lanes, lane, words[p]);
      }
#pragma unroll
      for (int p = 0; p < kTogether; ++p) {
        if (static_cast<uint32_t>(from + p) >= peers) continue;
#pragma unroll
        for (int quad = 0; quad < 4; ++quad) {
          T values[4];
          values_of(words[p], quad, scale[p], values);
#pragma unroll
          for (int k = 0; k < 4; ++k) add_to(&sums[quad][k], values[k]);
        }
      }
    }
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) put_quad<kType, false>(here + quad * part.stride, wide, sums[quad]);
  }
  for (uint64_t i = whole * block + grid.thread(); i < n; i += grid.threads()) {
    T sum = acc[i];
#pragma unroll
    for (int p = 0; p < kMostPeers; ++p) {
      if (static_cast<uint32_t>(p) >= peers) continue;
      const uint8_t* const scales = messages.scales[p];
      add_to(&sum, Values<T>(scales, scales + packed_at, n, block, false).at(i));
    }
    acc[i] = sum;
  }
}

}  // namespace
}  // namespace hybridcomp
