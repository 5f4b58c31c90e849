// MPC (hybridcomp/codecs/mpc.py): a warp for each chunk. The chunks' places in a message follow from the
// sizes before them: encoding leaves chunks apart, sums sizes, and moves the chunks together; decoding sums
// first.
#include "lossless/mpc.cuh"

namespace hybridcomp {
namespace {

// The payload's prefix; the chunks' 16-bit sizes follow it.
constexpr uint64_t kPrefix = 8;

HC_DEVICE uint64_t head_of(uint64_t chunks) { return kPrefix + 2 * chunks; }

HC_DEVICE uint32_t words_of(uint64_t words, uint64_t chunk) {
  const uint64_t left = words - chunk * kMpcChunk;
  return static_cast<uint32_t>(left < kMpcChunk ? left : kMpcChunk);
}

// Places of the kMpcWarps neighbouring chunks that a block takes, one for each warp.
struct Places {
  uint64_t begin[kMpcWarps];  // offset in the payload
  uint32_t bytes[kMpcWarps];
  uint32_t warps[kMpcWarps];  // sums of the warps
};

// Find the places of the chunks from `first` on. `sums` has, for each group, the bytes of all groups before
// it.
HC_DEVICE void find_places(const uint8_t* payload, uint64_t chunks, uint64_t first, const uint64_t* sums,
                           Places* places) {
  const uint32_t thread = threadIdx.x, lane = thread & 31u, warp = thread / 32;
  const uint64_t group = first / kMpcGroup, chunk = group * kMpcGroup + thread;
  const uint32_t bytes = chunk < chunks ? reinterpret_cast<const uint16_t*>(payload + kPrefix)[chunk] : 0;
  uint32_t end = warp_inclusive(bytes);
  if (lane == 31) places->warps[warp] = end;
  __syncthreads();
  for (uint32_t w = 0; w < warp; ++w) end += places->warps[w];
  if (chunk >= first && chunk < first + kMpcWarps) {
    places->begin[chunk - first] = head_of(chunks) + sums[group] + end - bytes;
    places->bytes[chunk - first] = bytes;
  }
  __syncthreads();
}

template <int Width>
HC_DEVICE void encode(const void* src, uint64_t words, uint32_t lag, uint8_t* scratch, uint8_t* payload) {
  using M = Mpc<Width>;
  HC_SHARED(typename M::Lane, rows, M::kShared * kMpcWarps);
  const uint64_t chunks = (words + kMpcChunk - 1) / kMpcChunk;
  const uint32_t warp = threadIdx.x / 32;
  for (uint64_t chunk = static_cast<uint64_t>(blockIdx.x) * kMpcWarps + warp; chunk < chunks;
       chunk += static_cast<uint64_t>(gridDim.x) * kMpcWarps) {
    const uint32_t bytes = encode_chunk<Width>(static_cast<const typename M::Word*>(src) + chunk * kMpcChunk,
                                               words_of(words, chunk), lag,
                                               scratch + chunk * kMpcChunk * Width, rows + warp * M::kShared);
    if ((threadIdx.x & 31u) == 0)
      reinterpret_cast<uint16_t*>(payload + kPrefix)[chunk] = static_cast<uint16_t>(bytes);
  }
}

template <int Width, typename Out>
HC_DEVICE void decode(const uint8_t* payload, uint64_t words, uint32_t lag, const uint64_t* sums, void* out,
                      uint32_t* status) {
  using M = Mpc<Width>;
  HC_SHARED(typename M::Lane, rows, M::kShared * kMpcWarps);
  HC_SHARED(Places, places, 1);
  if (stopped(status)) return;
  const uint64_t chunks = (words + kMpcChunk - 1) / kMpcChunk;
  const uint32_t warp = threadIdx.x / 32;
  for (uint64_t first = static_cast<uint64_t>(blockIdx.x) * kMpcWarps; first < chunks;
       first += static_cast<uint64_t>(gridDim.x) * kMpcWarps) {
    find_places(payload, chunks, first, sums, places);
    const uint64_t chunk = first + warp;
    if (chunk < chunks) {
      const bool good = decode_chunk<Width, Out>(
          payload + places->begin[warp], places->bytes[warp], words_of(words, chunk), lag,
          static_cast<typename Out::Target*>(out) + chunk * kMpcChunk, rows + warp * M::kShared);
      if (!good && (threadIdx.x & 31u) == 0) fail(status, kBadZeros);
    }
    __syncthreads();  // the places are read
  }
}

}  // namespace

// Sum the chunks' sizes: `sums` gets, for each group of kMpcGroup, the bytes of all groups before it. The
// payload has `others` bytes besides the chunks. Encoding (`length`): the payload's bytes go there. Decoding
// (`status`): each size is checked, and their sum against `payload_bytes`.
HC_KERNEL(kMpcThreads)
mpc_sums(const uint8_t* payload, uint64_t words, uint64_t width, uint64_t others, uint64_t payload_bytes,
         uint64_t* sums, uint32_t* done, uint64_t* length, uint32_t* status) {
  HC_SHARED(uint64_t, shared, kMpcWarps);
  HC_SHARED(uint32_t, last, 1);
  if (status && stopped(status)) return;
  const uint64_t chunks = (words + kMpcChunk - 1) / kMpcChunk, groups = (chunks + kMpcGroup - 1) / kMpcGroup;
  const uint16_t* sizes = reinterpret_cast<const uint16_t*>(payload + kPrefix);
  const uint32_t thread = threadIdx.x, lane = thread & 31u, warp = thread / 32;
  for (uint64_t group = blockIdx.x; group < groups; group += gridDim.x) {
    const uint64_t chunk = group * kMpcGroup + thread;
    uint32_t bytes = 0;
    if (chunk < chunks) {
      bytes = sizes[chunk];
      const uint32_t raw = words_of(words, chunk) * static_cast<uint32_t>(width);
      const uint32_t bitmap = static_cast<uint32_t>(mpc_bitmap_bytes(static_cast<int>(width)));
      const uint32_t lane_bytes = width == 8 ? 8 : 4;
      // Chunks must have whole lanes: the decoder relies on it that no chunk begins at an odd address.
      if (status && bytes != raw && (bytes > raw || bytes < bitmap || (bytes - bitmap) % lane_bytes))
        fail(status, kBadLength);
    }
    const uint32_t end = warp_inclusive(bytes);
    if (lane == 31) shared[warp] = end;
    __syncthreads();
    if (thread == 0) {
      uint64_t sum = 0;
      for (int w = 0; w < kMpcWarps; ++w) sum += shared[w];
      sums[group] = sum;
    }
    __syncthreads();
  }
  if (thread == 0) {
    __threadfence();
    last[0] = atomicAdd(done, 1u) + 1 == gridDim.x;
    __threadfence();
  }
  __syncthreads();
  if (!last[0]) return;
  uint64_t before = 0;
  for (uint64_t base = 0; base < groups; base += kMpcThreads) {
    const uint64_t group = base + thread;
    const uint32_t own = group < groups ? static_cast<uint32_t>(__ldcg(sums + group)) : 0;  // at most 2^20
    uint32_t end = warp_inclusive(own);
    if (lane == 31) shared[warp] = end;
    __syncthreads();
    for (uint32_t w = 0; w < warp; ++w) end += static_cast<uint32_t>(shared[w]);
    if (group < groups) sums[group] = before + end - own;
    for (int w = 0; w < kMpcWarps; ++w) before += shared[w];
    __syncthreads();
  }
  if (thread) return;
  if (length) *length = others + before;
  if (status && others + before != payload_bytes) fail(status, kBadLength);
}

// Write the rest of the payload, besides the sizes: the prefix, the chunks from scratch or, as they are, from
// the source, and the bytes after the last word.
HC_KERNEL(kMpcThreads)
mpc_place(const uint8_t* src, uint64_t bytes, uint64_t width, uint32_t lag, const uint8_t* scratch,
          const uint64_t* sums, const uint64_t* length, uint8_t* payload) {
  HC_SHARED(Places, places, 1);
  const uint64_t words = bytes / width, chunks = (words + kMpcChunk - 1) / kMpcChunk;
  const uint32_t warp = threadIdx.x / 32;
  if (global_thread() == 0) {
    reinterpret_cast<uint32_t*>(payload)[0] = lag;
    reinterpret_cast<uint32_t*>(payload)[1] = 0;
  }
  for (uint64_t first = static_cast<uint64_t>(blockIdx.x) * kMpcWarps; first < chunks;
       first += static_cast<uint64_t>(gridDim.x) * kMpcWarps) {
    find_places(payload, chunks, first, sums, places);
    const uint64_t chunk = first + warp;
    if (chunk < chunks) {
      const uint32_t size = places->bytes[warp];
      const bool raw = size == words_of(words, chunk) * width;
      warp_copy(payload + places->begin[warp], (raw ? src : scratch) + chunk * kMpcChunk * width, size);
    }
    __syncthreads();  // the places are read
  }
  const uint64_t tail = bytes - words * width;
  if (blockIdx.x == 0 && threadIdx.x < tail)
    payload[*length - tail + threadIdx.x] = src[words * width + threadIdx.x];
}

}  // namespace hybridcomp

#define HC_MPC_ENCODE(name, width)                                                     \
  HC_KERNEL(hybridcomp::kMpcThreads)                                                   \
  name(const void* src, std::uint64_t words, std::uint32_t lag, std::uint8_t* scratch, \
       std::uint8_t* payload) {                                                        \
    hybridcomp::encode<width>(src, words, lag, scratch, payload);                      \
  }
#define HC_MPC_DECODE(name, width, ...)                                                                \
  HC_KERNEL(hybridcomp::kMpcThreads)                                                                   \
  name(const std::uint8_t* payload, std::uint64_t words, std::uint32_t lag, const std::uint64_t* sums, \
       void* out, std::uint32_t* status) {                                                             \
    hybridcomp::decode<width, __VA_ARGS__>(payload, words, lag, sums, out, status);                    \
  }
HC_MPC_ENCODE(mpc_encode_2, 2)
HC_MPC_ENCODE(mpc_encode_4, 4)
HC_MPC_ENCODE(mpc_encode_8, 8)
HC_MPC_DECODE(mpc_decode_2, 2, hybridcomp::WordsOut<2>)
HC_MPC_DECODE(mpc_decode_4, 4, hybridcomp::WordsOut<4>)
HC_MPC_DECODE(mpc_decode_8, 8, hybridcomp::WordsOut<8>)
HC_MPC_DECODE(mpc_add_f32, 4, hybridcomp::SumOut<hybridcomp::kFloat32>)
HC_MPC_DECODE(mpc_add_f64, 8, hybridcomp::SumOut<hybridcomp::kFloat64>)
HC_MPC_DECODE(mpc_add_f16, 2, hybridcomp::SumOut<hybridcomp::kFloat16>)
HC_MPC_DECODE(mpc_add_bf16, 2, hybridcomp::SumOut<hybridcomp::kBFloat16>)
