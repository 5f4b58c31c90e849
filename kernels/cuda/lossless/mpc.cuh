// MPC on one chunk, by a warp: 32 words at a time, one to a lane. Bits are transposed by exchanges between
// lanes that differ in one bit of their number, after which a lane holds one bit of each word; the rows of
// lanes then pass through shared memory, since ZE goes along rows.
#pragma once

#include "common/bytes.cuh"
#include "common/elements.cuh"
#include "hybridcomp/mpc.hpp"

namespace hybridcomp {

constexpr int kMpcThreads = 128;
constexpr int kMpcWarps = kMpcThreads / 32;
constexpr int kMpcGroup = 128;  // chunks whose bytes are summed, and scanned, together
constexpr int kMpcTurns = static_cast<int>(kMpcChunk) / 32;

template <int Width>
struct Mpc {
  using Word = typename MpcWord<Width>::Word;
  using Lane = typename MpcWord<Width>::Lane;
  static constexpr int kRows = Width * 8;
  static constexpr int kTiles = static_cast<int>(kMpcRowBytes / sizeof(Lane));
  static constexpr int kStride = kTiles + 1;            // row stride in shared memory, without bank conflicts
  static constexpr int kShared = kRows * kStride;       // lanes of a warp there
  static constexpr int kBitmaps = kRows * kTiles / 32;  // words of a chunk's bitmap: 32 lanes each
  static constexpr int kTurn = Width == 4 ? 1 : 2;      // times 32 words that are transposed together
  // Return the place of lane `t` of the 32 lanes of the bitmap's word `w`.
  HC_DEVICE int place(int w, int t) {
    return Width == 8 ? (2 * w + (t >> 4)) * kStride + (t & 15) : w * kStride + t;
  }
};

// Do one step of BIT (mpc_swap of mpc.hpp), between the lanes whose numbers differ in `shift`: this lane's
// word keeps half of its bits and takes the other half from the partner's, moved to their places.
template <typename L>
HC_DEVICE L exchange_bits(L x, int shift) {
  const bool high = (threadIdx.x & static_cast<unsigned int>(shift)) != 0;
  const L mask = mpc_swap_mask<L>(shift), keep = high ? static_cast<L>(~mask) : mask;
  const L other = __shfl_xor_sync(kFullWarp, x, shift);
  return (x & keep) | ((high ? other >> shift : other << shift) & ~keep);
}

// Turn 32 words into rows of bits, or back; 16 in each half of the warp where First is 8.
template <int First, typename L>
HC_DEVICE L transposed(L x) {
#pragma unroll
  for (int shift = First; shift; shift /= 2) x = exchange_bits(x, shift);
  return x;
}

// Do LNVs of 32 words: the word `lag` places back is another lane's, of these words or of the 32 before.
template <typename Word, typename L>
HC_DEVICE L residual_of(L word, L before, uint32_t lag) {
  const uint32_t lane = threadIdx.x & 31u;
  const L sent = lane + lag < 32 ? word : before;
  const L earlier = __shfl_sync(kFullWarp, sent, static_cast<int>((lane - lag) & 31u));
  return mpc_residual(static_cast<Word>(word), static_cast<Word>(earlier));
}

// The inverse: sum within the 32 residuals, `lag` places apart, and then add the last value before them.
template <typename Word, typename L>
HC_DEVICE L value_of(L residual, L before, uint32_t lag) {
  const uint32_t lane = threadIdx.x & 31u;
  L sum = residual;
  for (uint32_t distance = lag; distance < 32; distance *= 2) {
    const L earlier = __shfl_up_sync(kFullWarp, sum, distance);
    if (lane >= distance) sum = mpc_value(static_cast<Word>(sum), static_cast<Word>(earlier));
  }
  const uint32_t last = 32 + lane - lag * (lane / lag + 1);
  const L earlier = __shfl_sync(kFullWarp, before, static_cast<int>(last));
  return mpc_value(static_cast<Word>(sum), static_cast<Word>(earlier));
}

// -- encode
// --------------------------------------------------------------------------------------------------

// Do BIT and LNV1s of 32 residuals, or of 64 where kTurn is 2. Rows go to `rows`; `bitmap` gets, in turn
// `turn`, bits for the tiles: those of this lane's rows, which `row_bitmaps` puts in order.
template <int Width>
HC_DEVICE void put_rows(const typename Mpc<Width>::Lane* residuals, int turn, typename Mpc<Width>::Lane* rows,
                        uint32_t* bitmap) {
  using M = Mpc<Width>;
  using L = typename M::Lane;
  const uint32_t lane = threadIdx.x & 31u;
  if constexpr (Width == 4) {
    const L x = transposed<16>(residuals[0]);  // bit `lane`
    const L above = __shfl_down_sync(kFullWarp, x, 1);
    const L d = mpc_residual<L>(x, lane == 31 ? 0 : above);
    rows[(31 - lane) * M::kStride + turn] = d;
    *bitmap |= static_cast<uint32_t>(d != 0) << turn;
  } else if constexpr (Width == 2) {
    // Two tiles, one for each half of the warp; a lane has words 16 apart.
    const bool upper = lane >= 16;
    const L got = __shfl_xor_sync(kFullWarp, upper ? residuals[0] : residuals[1], 16);
    const L x = transposed<8>(upper ? got | residuals[1] << 16 : residuals[0] | got << 16);
    const L above = __shfl_down_sync(kFullWarp, x, 1);
    const L d = mpc_residual<L>(x, (lane & 15u) == 15u ? 0 : above);
    const int tile = 2 * turn + (upper ? 1 : 0);
    rows[(15 - (lane & 15u)) * M::kStride + tile] = d;
    *bitmap |= static_cast<uint32_t>(d != 0) << tile;
  } else {
    // One tile; a lane has words 32 apart, then bits 32 apart.
    L low = residuals[0], high = residuals[1];
    mpc_swap<L>(low, high, 32, mpc_swap_mask<L>(32));
    low = transposed<16>(low);
    high = transposed<16>(high);
    const int next = static_cast<int>((lane + 1) & 31u);
    const L above_low = __shfl_sync(kFullWarp, lane == 0 ? high : low, next);
    const L above_high = __shfl_sync(kFullWarp, high, next);
    const L d_low = mpc_residual<L>(low, above_low);
    const L d_high = mpc_residual<L>(high, lane == 31 ? 0 : above_high);
    rows[(63 - lane) * M::kStride + turn] = d_low;
    rows[(31 - lane) * M::kStride + turn] = d_high;
    *bitmap |= static_cast<uint32_t>(d_low != 0) << turn | static_cast<uint32_t>(d_high != 0) << (16 + turn);
  }
}

// Return this lane's word of the chunk's bitmap; 0 where there are fewer.
template <int Width>
HC_DEVICE uint32_t row_bitmap(uint32_t bitmap) {
  const int lane = static_cast<int>(threadIdx.x & 31u);
  if constexpr (Width == 4) {
    return __shfl_sync(kFullWarp, bitmap, 31 - lane);
  } else if constexpr (Width == 2) {
    const uint32_t both = bitmap | __shfl_xor_sync(kFullWarp, bitmap, 16);
    const uint32_t mine = __shfl_sync(kFullWarp, both, (15 - lane) & 31);
    return lane < 16 ? mine : 0;
  } else {
    const uint32_t first = __shfl_sync(kFullWarp, bitmap, (63 - 2 * lane) & 31);
    const uint32_t second = __shfl_sync(kFullWarp, bitmap, (62 - 2 * lane) & 31);
    return lane < 16 ? first >> 16 | (second & 0xFFFF0000u) : (first & 0xFFFFu) | second << 16;
  }
}

// Encode `m` words to `out` (aligned, with room for them); return the bytes, those of the words if they are
// to stay as they are: then `out` is not written. `rows` is shared memory of the warp.
template <int Width>
HC_DEVICE uint32_t encode_chunk(const typename Mpc<Width>::Word* src, uint32_t m, uint32_t lag, uint8_t* out,
                                typename Mpc<Width>::Lane* rows) {
  using M = Mpc<Width>;
  using Word = typename M::Word;
  using L = typename M::Lane;
  constexpr int kBatch = 8;  // loads of a lane in flight
  const uint32_t lane = threadIdx.x & 31u;
  uint32_t bitmap = 0;
  L before = 0;
  for (int turn = 0; turn < kMpcTurns; turn += kBatch) {
    L words[kBatch], residuals[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t at = static_cast<uint32_t>(turn + i) * 32 + lane;
      words[i] = at < m ? src[at] : 0;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const L residual = residual_of<Word, L>(words[i], i ? words[i - 1] : before, lag);
      residuals[i] = static_cast<uint32_t>(turn + i) * 32 + lane < m ? residual : 0;
    }
    before = words[kBatch - 1];
#pragma unroll
    for (int i = 0; i < kBatch; i += M::kTurn)
      put_rows<Width>(residuals + i, (turn + i) / M::kTurn, rows, &bitmap);
  }
  const uint32_t bits = row_bitmap<Width>(bitmap);
  const uint32_t count = static_cast<uint32_t>(__popc(bits));
  const uint32_t end = warp_inclusive(count);
  const uint32_t total = __shfl_sync(kFullWarp, end, 31), begin = end - count;
  const uint32_t bytes = M::kBitmaps * 4 + total * static_cast<uint32_t>(sizeof(L)), raw = m * Width;
  __syncwarp();  // the rows are written
  if (bytes < raw) {
    if (lane < M::kBitmaps) reinterpret_cast<uint32_t*>(out)[lane] = bits;
    L* kept = reinterpret_cast<L*>(out + M::kBitmaps * 4);
#pragma unroll 4
    for (int w = 0; w < M::kBitmaps; ++w) {
      const uint32_t here = __shfl_sync(kFullWarp, bits, w), from = __shfl_sync(kFullWarp, begin, w);
      if ((here >> lane) & 1u)
        kept[from + static_cast<uint32_t>(__popc(here & ((1u << lane) - 1)))] =
            rows[M::place(w, static_cast<int>(lane))];
    }
  }
  __syncwarp();  // the rows are read
  return bytes < raw ? bytes : raw;
}

// -- decode
// --------------------------------------------------------------------------------------------------

// Invert LNV1s and ZE: write rows of lanes to `rows`. False if the chunk is not as long as its bitmap tells.
template <int Width>
HC_DEVICE bool restore_rows(const uint8_t* src, uint32_t bytes, typename Mpc<Width>::Lane* rows) {
  using M = Mpc<Width>;
  using L = typename M::Lane;
  const uint32_t lane = threadIdx.x & 31u;
  const uint32_t bits = lane < M::kBitmaps ? load_even<uint32_t>(src + 4 * lane) : 0;
  const uint32_t count = static_cast<uint32_t>(__popc(bits));
  const uint32_t end = warp_inclusive(count);
  const uint32_t total = __shfl_sync(kFullWarp, end, 31), begin = end - count;
  if (bytes != M::kBitmaps * 4 + total * static_cast<uint32_t>(sizeof(L))) return false;
  const uint8_t* kept = src + M::kBitmaps * 4;
  constexpr int kBatch = 8;
  L sum = 0;  // sum of the tile's rows so far
  for (int base = 0; base < M::kBitmaps; base += kBatch) {
    L d[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t here = __shfl_sync(kFullWarp, bits, base + i);
      const uint32_t from = __shfl_sync(kFullWarp, begin, base + i);
      const uint32_t at = from + static_cast<uint32_t>(__popc(here & ((1u << lane) - 1)));
      d[i] = (here >> lane) & 1u ? load_even<L>(kept + sizeof(L) * at) : 0;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      L row;
      if constexpr (Width == 8) {  // two rows at a time
        const L other = __shfl_xor_sync(kFullWarp, d[i], 16);
        const L next = mpc_value<L>(d[i], mpc_value<L>(other, sum));
        row = lane >= 16 ? next : mpc_value<L>(d[i], sum);
        sum = next;
      } else {
        row = sum = mpc_value<L>(d[i], sum);
      }
      rows[M::place(base + i, static_cast<int>(lane))] = row;
    }
  }
  return true;
}

// Invert BIT: read 32 residuals, or 64 where kTurn is 2.
template <int Width>
HC_DEVICE void take_rows(const typename Mpc<Width>::Lane* rows, int turn,
                         typename Mpc<Width>::Lane* residuals) {
  using M = Mpc<Width>;
  using L = typename M::Lane;
  const uint32_t lane = threadIdx.x & 31u;
  if constexpr (Width == 4) {
    residuals[0] = transposed<16>(rows[(31 - lane) * M::kStride + turn]);
  } else if constexpr (Width == 2) {
    const bool upper = lane >= 16;
    const L x = transposed<8>(rows[(15 - (lane & 15u)) * M::kStride + 2 * turn + (upper ? 1 : 0)]);
    const L got = __shfl_xor_sync(kFullWarp, upper ? x & 0xFFFFu : x >> 16, 16);
    residuals[0] = upper ? got : x & 0xFFFFu;
    residuals[1] = upper ? x >> 16 : got;
  } else {
    residuals[0] = transposed<16>(rows[(63 - lane) * M::kStride + turn]);
    residuals[1] = transposed<16>(rows[(31 - lane) * M::kStride + turn]);
    mpc_swap<L>(residuals[0], residuals[1], 32, mpc_swap_mask<L>(32));
  }
}

// Destination of words: written as they are, or added to a sum as floats.
template <int Width>
struct WordsOut {
  using Word = typename MpcWord<Width>::Word;
  using Target = Word;
  template <int N>
  HC_DEVICE void put(Target* out, uint32_t at, uint32_t m, const typename MpcWord<Width>::Lane* words) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (at + i * 32 < m) out[at + i * 32] = static_cast<Word>(words[i]);
  }
};

template <DTypeCode D, typename L>
HC_DEVICE ComputeOf<D> float_from(L word) {
  if constexpr (D == kFloat32 || D == kFloat64)
    return float_of(word);
  else
    return loaded<D>(static_cast<uint16_t>(word));
}

template <DTypeCode D>
struct SumOut {
  using Target = ComputeOf<D>;
  template <int N, typename L>
  HC_DEVICE void put(Target* out, uint32_t at, uint32_t m, const L* words) {
    Target sums[N];
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] = at + i * 32 < m ? out[at + i * 32] : Target(0);
#pragma unroll
    for (int i = 0; i < N; ++i) add_to(&sums[i], float_from<D>(words[i]));
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (at + i * 32 < m) out[at + i * 32] = sums[i];
  }
};

// Decode `m` words from `bytes` bytes at an even address to `out`, the first word's place. False if the chunk
// is malformed: then `out` is not written.
template <int Width, typename Out>
HC_DEVICE bool decode_chunk(const uint8_t* src, uint32_t bytes, uint32_t m, uint32_t lag,
                            typename Out::Target* out, typename Mpc<Width>::Lane* rows) {
  using M = Mpc<Width>;
  using Word = typename M::Word;
  using L = typename M::Lane;
  constexpr int kBatch = 4;
  const uint32_t lane = threadIdx.x & 31u;
  const bool raw = bytes == m * Width;
  const bool good = raw || restore_rows<Width>(src, bytes, rows);  // the whole warp agrees
  __syncwarp();
  if (good) {
    L before = 0;
    for (uint32_t turn = 0; turn * 32 < m; turn += kBatch) {
      L words[kBatch];
      if (raw) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const uint32_t at = (turn + static_cast<uint32_t>(i)) * 32 + lane;
          words[i] = at < m ? load_even<Word>(src + at * Width) : 0;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kBatch; i += M::kTurn)
          take_rows<Width>(rows, (static_cast<int>(turn) + i) / M::kTurn, words + i);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          words[i] = value_of<Word, L>(words[i], before, lag);
          before = words[i];
        }
      }
      Out::template put<kBatch>(out, turn * 32 + lane, m, words);
    }
  }
  __syncwarp();  // the rows are read
  return good;
}

}  // namespace hybridcomp
