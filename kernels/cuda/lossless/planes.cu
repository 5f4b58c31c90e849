// Planes of bytes (hybridcomp/codecs/lossless.py): the choice of those worth compressing, words split into
// them and joined again, and the planes and frames of a message put together. nvCOMP or the host does zstd
// itself.
#include "common/bytes.cuh"
#include "common/elements.cuh"
#include "hybridcomp/planes.hpp"

namespace hybridcomp {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kEach = 4;               // words of a thread at a time
constexpr uint64_t kChunk = 1u << 17;  // words; CHUNK of lossless.py
constexpr uint64_t kTile = 4096;       // words of one chunk that a block takes at a time
constexpr uint64_t kPiece = 4096;      // bytes that a warp copies at a time
constexpr uint32_t kFrame = 1u << 24;  // kind of a zstd frame in a message's table

template <int Width>
struct Unsigned;
template <>
struct Unsigned<1> {
  using Word = uint8_t;
};
template <>
struct Unsigned<2> {
  using Word = uint16_t;
};
template <>
struct Unsigned<4> {
  using Word = uint32_t;
};
template <>
struct Unsigned<8> {
  using Word = uint64_t;
};
template <int Width>
using Word = typename Unsigned<Width>::Word;

HC_DEVICE uint64_t words_of(uint64_t words, uint64_t chunk) {
  const uint64_t left = words - chunk * kChunk;
  return left < kChunk ? left : kChunk;
}

// -- the choice of planes
// ------------------------------------------------------------------------------------

// Choose the planes, by a block for each chunk: count bytes of a sample (compressible_planes of
// kernels/codecs/lossless/planes.cpp).
template <int Width>
HC_DEVICE void sample(const void* from, uint64_t words, uint32_t rotate, uint32_t* chosen) {
  HC_SHARED(uint32_t, counts, Width * 256);
  HC_SHARED(uint32_t, found, 1);
  const uint64_t chunks = (words + kChunk - 1) / kChunk;
  const uint32_t thread = threadIdx.x, lane = thread & 31u, warp = thread / 32;
  for (uint64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const Word<Width>* src = static_cast<const Word<Width>*>(from) + chunk * kChunk;
    const uint64_t m = words_of(words, chunk);
    for (uint32_t i = thread; i < Width * 256; i += kThreads) counts[i] = 0;
    if (thread == 0) found[0] = 0;
    __syncthreads();
    const uint32_t runs = m <= kSampleRuns * kSampleRun ? 1 : kSampleRuns;
    const uint32_t run = static_cast<uint32_t>(runs == 1 ? m : kSampleRun);
    for (uint32_t i = thread; i < runs * run; i += kThreads) {
      const uint64_t begin = runs == 1 ? 0 : (m - run) * (i / run) / (runs - 1);
      Word<Width> x = src[begin + i % run];
      if (rotate) x = rotated(x);
#pragma unroll
      for (int k = 0; k < Width; ++k)
        atomicAdd(reinterpret_cast<unsigned int*>(counts) + k * 256 + static_cast<int>((x >> (8 * k)) & 255u),
                  1u);
    }
    __syncthreads();
    if (warp < Width) {    // a warp for each plane
      uint32_t pairs = 0;  // at most 2^20
      for (uint32_t i = lane; i < 256; i += 32) {
        const uint32_t c = counts[warp * 256 + i];
        pairs += c * (c - (c != 0));
      }
      for (int distance = 16; distance; distance /= 2) pairs += __shfl_xor_sync(kFullWarp, pairs, distance);
      if (lane == 0 && compressible(pairs, runs * run))
        atomicOr(reinterpret_cast<unsigned int*>(found), 1u << warp);
    }
    __syncthreads();
    if (thread == 0) chosen[chunk] = found[0];
    __syncthreads();
  }
}

// -- split and join
// ------------------------------------------------------------------------------------------

// Split words into planes. Plane k of chunk c begins at planes + (c * Width + k) * stride, which is a
// multiple of 16.
template <int Width>
HC_DEVICE void split(const void* from, uint64_t words, uint32_t rotate, uint8_t* planes, uint64_t stride) {
  using W = Word<Width>;
  const W* src = static_cast<const W*>(from);
  const bool packs = aligned_to(src, Width * kEach < 16 ? Width * kEach : 16);
  const uint64_t groups = (words + kEach - 1) / kEach;
  for (uint64_t group = global_thread(); group < groups; group += global_threads()) {
    const uint64_t at = group * kEach, chunk = at / kChunk;
    uint8_t* to = planes + chunk * Width * stride + (at - chunk * kChunk);
    const bool whole = at + kEach <= words;
    Pack<W, kEach> pack;
    if (whole && packs) {
      pack = *reinterpret_cast<const Pack<W, kEach>*>(src + at);
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) pack.of[i] = at + i < words ? src[at + i] : 0;
    }
    if (rotate) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) pack.of[i] = rotated(pack.of[i]);
    }
    // A chunk's words, and so a plane's bytes, end within a group only at the end of all: the stride has
    // room.
#pragma unroll
    for (int k = 0; k < Width; ++k) {
      uint32_t bytes = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        bytes |= (static_cast<uint32_t>(pack.of[i] >> (8 * k)) & 255u) << (8 * i);
      *reinterpret_cast<uint32_t*>(to + static_cast<uint64_t>(k) * stride) = bytes;
    }
  }
}

// Load four bytes at any address of which `left` are a plane's; zeros for the others.
HC_DEVICE uint32_t load_four(const uint8_t* p, uint64_t left) {
  const uint32_t odd = static_cast<uint32_t>(reinterpret_cast<uint64_t>(p) & 3);
  const uint32_t* from = reinterpret_cast<const uint32_t*>(p - odd);
  if (odd == 0 && left >= 4) return from[0];
  if (left >= 8) return __funnelshift_r(from[0], from[1], 8 * odd);
  uint32_t x = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (static_cast<uint64_t>(i) < left) x |= static_cast<uint32_t>(p[i]) << (8 * i);
  return x;
}

template <int Width>
struct WordsOut {
  using Target = Word<Width>;
  HC_DEVICE void put(Target* out, const Word<Width>* words, uint64_t left, bool packs) {
    if (packs && left >= kEach) {
      Pack<Target, kEach> pack;
#pragma unroll
      for (int i = 0; i < kEach; ++i) pack.of[i] = words[i];
      *reinterpret_cast<Pack<Target, kEach>*>(out) = pack;
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (static_cast<uint64_t>(i) < left) out[i] = words[i];
    }
  }
};

template <DTypeCode D>
struct SumOut {
  using Target = ComputeOf<D>;
  template <typename W>
  HC_DEVICE Target value(W word) {
    if constexpr (D == kFloat32 || D == kFloat64)
      return float_of(word);
    else
      return loaded<D>(word);
  }
  template <typename W>
  HC_DEVICE void put(Target* out, const W* words, uint64_t left, bool packs) {
    if (packs && left >= kEach) {
      Pack<Target, kEach> pack = *reinterpret_cast<const Pack<Target, kEach>*>(out);
#pragma unroll
      for (int i = 0; i < kEach; ++i) add_to(pack.of + i, value(words[i]));
      *reinterpret_cast<Pack<Target, kEach>*>(out) = pack;
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (static_cast<uint64_t>(i) < left) add_to(out + i, value(words[i]));
    }
  }
};

// Join planes to words. `planes` has the address of each plane of each chunk.
template <int Width, typename Out>
HC_DEVICE void join(const uint64_t* planes, uint64_t words, uint32_t rotate, void* to,
                    const uint32_t* status) {
  using W = Word<Width>;
  using T = typename Out::Target;
  if (*status) return;
  T* out = static_cast<T*>(to);
  const bool packs = aligned_to(out, sizeof(T) * kEach < 16 ? sizeof(T) * kEach : 16);
  const uint64_t tiles = (words + kTile - 1) / kTile;
  for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const uint64_t chunk = tile * kTile / kChunk, m = words_of(words, chunk),
                   from = tile * kTile - chunk * kChunk;
    const uint8_t* plane[Width];
#pragma unroll
    for (int k = 0; k < Width; ++k) plane[k] = reinterpret_cast<const uint8_t*>(planes[chunk * Width + k]);
#pragma unroll
    for (uint64_t i = 0; i < kTile; i += kThreads * kEach) {
      const uint64_t at = from + i + threadIdx.x * kEach;
      if (at >= m) break;
      W word[kEach] = {};
#pragma unroll
      for (int k = 0; k < Width; ++k) {
        const uint32_t bytes = load_four(plane[k] + at, m - at);
#pragma unroll
        for (int e = 0; e < kEach; ++e)
          word[e] =
              static_cast<W>(word[e] | static_cast<W>(static_cast<W>((bytes >> (8 * e)) & 255u) << (8 * k)));
      }
      if (rotate) {
#pragma unroll
        for (int e = 0; e < kEach; ++e) word[e] = rotated_back(word[e]);
      }
      Out::put(out + chunk * kChunk + at, word, m - at, packs);
    }
  }
}

// -- messages
// ------------------------------------------------------------------------------------------------

// Whether `size` bytes begin with the header of a zstd frame (RFC 8878) that tells a content of `content`
// bytes.
HC_DEVICE bool tells(const uint8_t* frame, uint64_t size, uint64_t content) {
  if (size < 6) return false;
  if (frame[0] != 0x28 || frame[1] != 0xB5 || frame[2] != 0x2F || frame[3] != 0xFD) return false;
  const uint32_t descriptor = frame[4];
  const uint32_t flag = descriptor >> 6, single = (descriptor >> 5) & 1u, dictionary = descriptor & 3u;
  if ((descriptor & 8u) || (flag == 0 && !single)) return false;
  const uint32_t at = 5 + (single ? 0 : 1) + (dictionary == 3 ? 4 : dictionary), bytes = 1u << flag;
  if (at + bytes > size) return false;
  uint64_t told = bytes == 2 ? 256 : 0;
  for (uint32_t i = 0; i < bytes; ++i) told += static_cast<uint64_t>(frame[at + i]) << (8 * i);
  return told == content;
}

}  // namespace

// Write the table of planes of a message, by one block. `frames` has the address of each plane's frame and
// then the bytes of each, zero for planes that have none; a frame that is not smaller than its plane, or does
// not tell the plane's size, is not used. `moves` gets the copies for planes_copy: sources, destinations,
// numbers of bytes.
HC_KERNEL(kThreads)
planes_table(const uint64_t* frames, uint64_t words, uint64_t width, const uint8_t* planes, uint64_t stride,
             uint8_t* payload, uint64_t* moves, uint64_t* length) {
  HC_SHARED(uint64_t, sums, kWarps);
  const uint64_t chunks = (words + kChunk - 1) / kChunk, count = chunks * width;
  const uint32_t thread = threadIdx.x, lane = thread & 31u, warp = thread / 32;
  uint64_t before = 4 * count;
  for (uint64_t base = 0; base < count; base += kThreads) {
    const uint64_t k = base + thread;
    uint32_t size = 0;
    if (k < count) {
      const uint64_t m = words_of(words, k / width), frame_bytes = frames[count + k];
      const uint8_t* frame = reinterpret_cast<const uint8_t*>(frames[k]);
      const bool used = frame && frame_bytes < m && tells(frame, frame_bytes, m);
      size = static_cast<uint32_t>(used ? frame_bytes : m);
      reinterpret_cast<uint32_t*>(payload)[k] = used ? kFrame | size : size;
      moves[k] = used ? frames[k] : reinterpret_cast<uint64_t>(planes + k * stride);
      moves[2 * count + k] = size;
    }
    uint32_t end = warp_inclusive(size);
    if (lane == 31) sums[warp] = end;
    __syncthreads();
    for (uint32_t w = 0; w < warp; ++w) end += static_cast<uint32_t>(sums[w]);  // at most 2^25
    if (k < count) moves[count + k] = reinterpret_cast<uint64_t>(payload) + before + end - size;
    for (int w = 0; w < kWarps; ++w) before += sums[w];
    __syncthreads();
  }
  if (thread == 0) *length = before;
}

// Copy `count` runs of at most `longest` bytes.
HC_KERNEL(kThreads)
planes_copy(const uint64_t* moves, uint64_t count, uint64_t longest, const uint32_t* status) {
  if (status && *status) return;
  const uint64_t pieces = (longest + kPiece - 1) / kPiece;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; i < count * pieces;
       i += static_cast<uint64_t>(gridDim.x) * kWarps) {
    const uint64_t k = i / pieces, at = (i - k * pieces) * kPiece, size = moves[2 * count + k];
    if (at < size)
      warp_copy(reinterpret_cast<uint8_t*>(moves[count + k]) + at,
                reinterpret_cast<const uint8_t*>(moves[k]) + at, size - at < kPiece ? size - at : kPiece);
  }
}

}  // namespace hybridcomp

#define HC_PLANES(width)                                                                                     \
  HC_KERNEL(hybridcomp::kThreads)                                                                            \
  planes_sample_##width(const void* src, std::uint64_t words, std::uint32_t rotate, std::uint32_t* chosen) { \
    hybridcomp::sample<width>(src, words, rotate, chosen);                                                   \
  }                                                                                                          \
  HC_KERNEL(hybridcomp::kThreads)                                                                            \
  planes_split_##width(const void* src, std::uint64_t words, std::uint32_t rotate, std::uint8_t* planes,     \
                       std::uint64_t stride) {                                                               \
    hybridcomp::split<width>(src, words, rotate, planes, stride);                                            \
  }                                                                                                          \
  HC_PLANES_JOIN(planes_join_##width, width, hybridcomp::WordsOut<width>)
#define HC_PLANES_JOIN(name, width, ...)                                                  \
  HC_KERNEL(hybridcomp::kThreads)                                                         \
  name(const std::uint64_t* planes, std::uint64_t words, std::uint32_t rotate, void* out, \
       const std::uint32_t* status) {                                                     \
    hybridcomp::join<width, __VA_ARGS__>(planes, words, rotate, out, status);             \
  }
HC_PLANES(1)
HC_PLANES(2)
HC_PLANES(4)
HC_PLANES(8)
HC_PLANES_JOIN(planes_add_f32, 4, hybridcomp::SumOut<hybridcomp::kFloat32>)
HC_PLANES_JOIN(planes_add_f64, 8, hybridcomp::SumOut<hybridcomp::kFloat64>)
HC_PLANES_JOIN(planes_add_f16, 2, hybridcomp::SumOut<hybridcomp::kFloat16>)
HC_PLANES_JOIN(planes_add_bf16, 2, hybridcomp::SumOut<hybridcomp::kBFloat16>)
