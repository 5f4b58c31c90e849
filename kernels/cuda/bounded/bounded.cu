// Error-bounded compression (codec `bounded`). Encoding finds the range of the values, if the bound is a
// share of it; writes the prefix; writes each chunk's bytes, apart, with room for all elements; finds each
// chunk's start; and moves the bytes there. Decoding finds each chunk's bytes and its start, and then decodes
// the elements.
#include "bounded/bounded_decode.cuh"
#include "bounded/bounded_encode.cuh"

namespace hybridcomp {
namespace {

constexpr int kScanThreads = 1024;
constexpr uint32_t kScanEach = 16;  // chunks of a thread at a time: rows of a warp

// -- the range ---------------------------------------------------------------------------------------------

// Return bits as a signed integer that is ordered as the numbers are, and back. Bits of 16-bit types come as
// the upper half of 32.
HC_DEVICE int32_t key_of(uint32_t bits) {
  const int32_t s = static_cast<int32_t>(bits);
  return s ^ ((s >> 31) & 0x7FFFFFFF);
}
HC_DEVICE int64_t key_of(uint64_t bits) {
  const int64_t s = static_cast<int64_t>(bits);
  return s ^ ((s >> 63) & 0x7FFFFFFFFFFFFFFFll);
}

template <DTypeCode D>
struct Extremes {
  using Word = ShuffledOf<D>;
  using Key = decltype(key_of(Word()));
  static constexpr Word kInfinite = D == kFloat16 ? 0x7C000000u : Real<ComputeOf<D>>::kInfinity;
  Key low = static_cast<Key>(kInfinite), high = ~static_cast<Key>(kInfinite);  // the keys of no finite value

  __device__ __forceinline__ void take(BitsOf<D> element) {
    const Word bits = static_cast<Word>(element) << (kElement<D> == 2 ? 16 : 0);
    const Key key = key_of(bits);
    const bool finite = (bits & Real<ComputeOf<D>>::kMagnitude) < kInfinite;
    low = finite && key < low ? key : low;
    high = finite && key > high ? key : high;
  }
};

HC_DEVICE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// Find the least `low` and the largest `high` of a thread block, in thread 0. `shared` has 64 places.
HC_DEVICE void extremes_of_block(int64_t* low, int64_t* high, int64_t* shared) {
  int64_t least = *low, most = ~*high;  // ~high has the opposite order
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int distance = 16; distance; distance /= 2) {
    least = lesser(least, __shfl_xor_sync(kFullWarp, least, distance));
    most = lesser(most, __shfl_xor_sync(kFullWarp, most, distance));
  }
  if (lane == 0) {
    shared[warp] = least;
    shared[32 + warp] = most;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (uint32_t w = 1; w < blockDim.x / 32; ++w) {
      least = lesser(least, shared[w]);
      most = lesser(most, shared[32 + w]);
    }
  }
  *low = least;
  *high = ~most;
}

// Return the number of a key; zero if it is denormal.
HC_DEVICE double number_of(int64_t key, uint32_t dtype) {
  if (dtype == kFloat64) {
    const uint64_t bits = static_cast<uint64_t>(key_of(static_cast<uint64_t>(key)));
    return bits & Real<double>::kInfinity ? float_of(bits) : 0.0;
  }
  uint32_t bits = static_cast<uint32_t>(key_of(static_cast<uint32_t>(key)));
  if (dtype == kFloat16) bits = half_to_float_bits(static_cast<uint16_t>(bits >> 16));
  return bits & Real<float>::kInfinity ? static_cast<double>(float_of(bits)) : 0.0;
}

// Find each thread block's extremes, as keys.
template <DTypeCode D>
HC_DEVICE void range_of(const void* from, uint64_t n, int64_t* lows, int64_t* highs) {
  constexpr uint32_t kWide = 16 / kElement<D>;
  const BitsOf<D>* const src = static_cast<const BitsOf<D>*>(from);
  const uint64_t whole = aligned_to(src, 16) ? n / kWide : 0;
  HC_SHARED(int64_t, shared, 64);
  Extremes<D> found;
#pragma unroll 4
  for (uint64_t i = global_thread(); i < whole; i += global_threads()) {
    const auto pack = *reinterpret_cast<const Pack<BitsOf<D>, kWide>*>(src + i * kWide);
#pragma unroll
    for (uint32_t k = 0; k < kWide; ++k) found.take(pack.of[k]);
  }
  for (uint64_t i = whole * kWide + global_thread(); i < n; i += global_threads()) found.take(src[i]);
  int64_t low = found.low, high = found.high;
  extremes_of_block(&low, &high, shared);
  if (threadIdx.x == 0) {
    lows[blockIdx.x] = low;
    highs[blockIdx.x] = high;
  }
}

template <DTypeCode D>
HC_DEVICE void encode_all(const void* from, uint64_t n, uint8_t* payload, uint4* scratch, uint32_t* sums) {
  constexpr uint32_t kRoom = kChunk * kElement<D> / 16;
  const BitsOf<D>* const src = static_cast<const BitsOf<D>*>(from);
  const auto step = bounded_step<D, ComputeOf<D>>(reinterpret_cast<const BoundedPrefix*>(payload)->bound);
  HC_SHARED(uint4, stage, kRoom);
  HC_SHARED(uint32_t, sizes, kChunkBlocks);
  HC_SHARED(uint32_t, kinds, kChunkBlocks);
  for (uint64_t chunk = blockIdx.x; chunk < chunks_in(n); chunk += gridDim.x) {
    const uint32_t bytes =
        encode_chunk<D>(src, n, chunk, aligned_to(src, kFourAligned<D>), step,
                        payload + sizeof(BoundedPrefix), scratch + chunk * kRoom, stage, sizes, kinds);
    if (threadIdx.x == 0) sums[chunk] = bytes;
  }
}

template <DTypeCode D, DTypeCode O, bool Add>
HC_DEVICE void decode_all(const uint8_t* payload, uint64_t bytes, const uint64_t* starts, uint64_t n,
                          void* to, const uint32_t* status) {
  if (*status) return;
  const uint8_t* const codes = payload + sizeof(BoundedPrefix);
  StorageOf<O>* const out = static_cast<StorageOf<O>*>(to);
  const auto step =
      bounded_step<D, ComputeOf<D>>(reinterpret_cast<const BoundedPrefix*>(payload)->bound).step;
  HC_SHARED(uint32_t, stage, kChunk* kElement<D> / 4);
  for (uint64_t chunk = blockIdx.x; chunk < chunks_in(n); chunk += gridDim.x)
    decode_chunk<D, O, Add>(codes, payload + starts[chunk], payload + bytes, n, chunk, step,
                            aligned_to(out, kFourAligned<O>), out, stage);
}

}  // namespace

// Write the payload's prefix. The bound is `error`, or, if `count` is not 0, that share of the range found by
// so many blocks of bounded_range.
HC_KERNEL(kThreads)
bounded_prefix(uint8_t* payload, uint64_t error, uint32_t dtype, const int64_t* lows, const int64_t* highs,
               uint32_t count) {
  HC_SHARED(int64_t, shared, 64);
  double bound = float_of(error);
  if (count) {
    int64_t low = lows[0], high = highs[0];
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      low = lows[i] < low ? lows[i] : low;
      high = highs[i] > high ? highs[i] : high;
    }
    extremes_of_block(&low, &high, shared);
    bound = low > high ? 0.0 : bounded_relative(number_of(low, dtype), number_of(high, dtype), bound);
  }
  if (threadIdx.x == 0) *reinterpret_cast<BoundedPrefix*>(payload) = {bound, kBoundedBlock, 0};
}

// Find the bytes of each chunk of a payload of n elements of `size` bytes, by a warp each. Blocks do not look
// at the status, since other blocks may be setting it.
HC_KERNEL(kThreads)
bounded_sums(const uint8_t* payload, uint64_t n, uint32_t size, uint32_t* sums, uint32_t* status) {
  const uint8_t* const codes = payload + sizeof(BoundedPrefix);
  const uint32_t lane = threadIdx.x % 32;
  const uint64_t blocks = blocks_in(n), warps = global_threads() / 32;
  for (uint64_t chunk = global_thread() / 32; chunk < chunks_in(n); chunk += warps) {
    const uint64_t block = chunk * kChunkBlocks + lane;
    const uint64_t left = block < blocks ? n - block * kBoundedBlock : 0;
    const uint64_t m = left < kBoundedBlock ? left : kBoundedBlock;
    const uint32_t bytes = block < blocks ? bounded_bytes(codes[block], m, size) : 0;
    if (__any_sync(kFullWarp, bytes & 0x8000u)) {
      if (lane == 0) fail(status, kBadBoundedCode);
      return;
    }
    const uint32_t sum = sum_to_here(bytes);
    if (lane == 31) sums[chunk] = sum;
  }
}

// Find each chunk's start in the payload; the first chunk's is `base`. The end goes to `*total`, or must be
// `expected` if there is a status.
HC_KERNEL(kScanThreads)
bounded_starts(const uint32_t* sums, uint64_t chunks, uint64_t base, uint64_t* starts, uint64_t expected,
               uint64_t* total, uint32_t* status) {
  HC_SHARED(uint32_t, warps, 32);
  const bool stop = status && *status;
  __syncthreads();  // before thread 0 sets the status
  if (stop) return;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (uint64_t at = 0; at < chunks; at += kScanThreads * kScanEach) {
    // A warp has rows of 32 chunks, so that its lanes read and write neighbouring memory at once.
    const uint64_t own = at + warp * (32 * kScanEach) + lane;
    uint32_t places[kScanEach], rows = 0;
#pragma unroll
    for (uint32_t i = 0; i < kScanEach; ++i) places[i] = own + 32 * i < chunks ? sums[own + 32 * i] : 0;
#pragma unroll
    for (uint32_t i = 0; i < kScanEach; ++i) {
      const uint32_t end = sum_to_here(places[i]);
      places[i] = rows + end - places[i];
      rows += __shfl_sync(kFullWarp, end, 31);
    }
    if (lane == 31) warps[warp] = rows;
    __syncthreads();
    const uint32_t warp_end = sum_to_here(warps[lane]);
    const uint32_t before = __shfl_sync(kFullWarp, warp_end, warp > 0 ? warp - 1 : 0);
    const uint64_t start = base + (warp > 0 ? before : 0);
#pragma unroll
    for (uint32_t i = 0; i < kScanEach; ++i)
      if (own + 32 * i < chunks) starts[own + 32 * i] = start + places[i];
    base += __shfl_sync(kFullWarp, warp_end, 31);
    __syncthreads();  // `warps` is written again
  }
  if (threadIdx.x) return;
  if (total) *total = base;
  if (status && base != expected) fail(status, kBadLength);
}

// Move each chunk's bytes, which are `stride` apart at aligned addresses, to their place; by a warp each.
HC_KERNEL(kThreads)
bounded_move(const uint8_t* scratch, uint64_t stride, uint64_t chunks, const uint32_t* sums,
             const uint64_t* starts, uint8_t* payload) {
  const uint32_t lane = threadIdx.x % 32;
  const uint64_t warps = global_threads() / 32;
  for (uint64_t chunk = global_thread() / 32; chunk < chunks; chunk += warps) {
    const uint32_t bytes = sums[chunk];
    const uint8_t* const from = scratch + chunk * stride;
    uint8_t* const to = payload + starts[chunk];
    const uint32_t unaligned = (0u - static_cast<uint32_t>(reinterpret_cast<uint64_t>(to))) & 3u;
    const uint32_t head = unaligned < bytes ? unaligned : bytes, whole = (bytes - head) / 4;
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(from);
    uint32_t* const aligned = reinterpret_cast<uint32_t*>(to + head);
    if (lane < head) to[lane] = from[lane];
#pragma unroll 4
    for (uint32_t i = lane; i < whole; i += 32)
      aligned[i] = head ? __funnelshift_r(words[i], words[i + 1], 8 * head) : words[i];
    const uint32_t done = head + whole * 4;
    if (lane < bytes - done) to[done + lane] = from[done + lane];
  }
}

}  // namespace hybridcomp

#define HC_BOUNDED_RANGE(name, D)                                                   \
  HC_KERNEL(hybridcomp::kThreads)                                                   \
  name(const void* src, std::uint64_t n, std::int64_t* lows, std::int64_t* highs) { \
    hybridcomp::range_of<D>(src, n, lows, highs);                                   \
  }
HC_EACH_INPUT(HC_BOUNDED_RANGE, bounded_range)

#define HC_BOUNDED_ENCODE(name, D)                                                                     \
  HC_KERNEL(hybridcomp::kThreads)                                                                      \
  name(const void* src, std::uint64_t n, std::uint8_t* payload, uint4* scratch, std::uint32_t* sums) { \
    hybridcomp::encode_all<D>(src, n, payload, scratch, sums);                                         \
  }
HC_EACH_INPUT(HC_BOUNDED_ENCODE, bounded_encode)

// There is a decoder for each element type, since kept blocks hold elements.
#define HC_BOUNDED_DECODE(name, D, O, Add)                                                             \
  HC_KERNEL(hybridcomp::kThreads)                                                                      \
  name(const std::uint8_t* payload, std::uint64_t bytes, const std::uint64_t* starts, std::uint64_t n, \
       void* out, const std::uint32_t* status) {                                                       \
    hybridcomp::decode_all<D, O, Add>(payload, bytes, starts, n, out, status);                         \
  }
#define HC_BOUNDED_DECODES(name, D)                             \
  HC_BOUNDED_DECODE(name##_f32, D, hybridcomp::kFloat32, false) \
  HC_BOUNDED_DECODE(name##_f64, D, hybridcomp::kFloat64, false) \
  HC_BOUNDED_DECODE(name##_f16, D, hybridcomp::kFloat16, false) \
  HC_BOUNDED_DECODE(name##_bf16, D, hybridcomp::kBFloat16, false)
HC_EACH_INPUT(HC_BOUNDED_DECODES, bounded_decode)
HC_BOUNDED_DECODE(bounded_decode_f32_f32_add, hybridcomp::kFloat32, hybridcomp::kFloat32, true)
HC_BOUNDED_DECODE(bounded_decode_f64_f64_add, hybridcomp::kFloat64, hybridcomp::kFloat64, true)
HC_BOUNDED_DECODE(bounded_decode_f16_f32_add, hybridcomp::kFloat16, hybridcomp::kFloat32, true)
HC_BOUNDED_DECODE(bounded_decode_bf16_f32_add, hybridcomp::kBFloat16, hybridcomp::kFloat32, true)
