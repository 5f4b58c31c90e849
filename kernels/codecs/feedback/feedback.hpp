// Kernels of error feedback.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/block/block.hpp"
#include "codecs/common/kernels.hpp"
#include "codecs/messages/codec_identity.hpp"
#include "hybridcomp/wire.hpp"

namespace hybridcomp {

class Rooms;
struct Encoder;

// Values to encode: x, of `dtype` and of any alignment; or, where there is a momentum, which is aligned and
// of the computing type, beta * momentum + (1 - beta) * x.
struct Source {
  const std::uint8_t* x;
  DTypeCode dtype;
  const std::uint8_t* momentum = nullptr;
  double beta = 0;

  // Return the values from an element on.
  Source from(std::size_t at) const {
    const std::size_t size = dtype == kFloat64 ? 8 : 4;
    return {x + at * size_of(dtype), dtype, momentum ? momentum + at * size : nullptr, beta};
  }
};

// Arrays of states are aligned and of the computing type: double if `wide`, else float. A function that
// returns bool tells whether all values written are finite. An output may be the same memory as an input of
// its own type.
constexpr std::uint32_t kLongestTile = 1024;

struct FeedbackKernels {
  // out = x
  void (*blend)(const Source& x, void* out, std::size_t n);

  // out = x + e, or x - e with `subtract`.
  bool (*add)(const Source& x, const void* e, void* out, std::size_t n, bool subtract);

  // Whether all |x + e| are below 2^125 (2^1021): then a message's error is finite, too.
  bool (*modest)(const Source& x, const void* e, std::size_t n);

  // x /= by
  void (*divide)(void* x, bool wide, std::size_t n, double by);

  // out = (corrected - decoded) * weight
  bool (*lose)(const void* corrected, const void* decoded, void* out, bool wide, std::size_t n,
               double weight);

  // e = beta * e + (1 - beta) * (corrected - decoded) * weight
  bool (*average)(const void* corrected, const void* decoded, void* e, bool wide, std::size_t n,
                  double weight, double beta);

  // moved = momentum * velocity + x; out = sum + moved
  void (*move)(const void* x, DTypeCode dtype, const void* velocity, const void* sum, void* moved, void* out,
               std::size_t n, double momentum);

  // moved = momentum * velocity + x; out = x + momentum * moved
  bool (*accelerate)(const void* x, DTypeCode dtype, const void* velocity, void* moved, void* out,
                     std::size_t n, double momentum);

  // decoded = corrected - decoded; moved = 0 where decoded was not 0
  bool (*mask)(const void* corrected, void* decoded, void* moved, bool wide, std::size_t n);

  // Quantize x + e to int8 blocks as BlockKernels does (to nearest, scales alone), and write the error to
  // `lost`, past the caches if it `streams` (see below): each element is read once. `block` is at most
  // kLongestTile.
  bool (*quantize8)(const Source& x, const void* e, void* lost, std::size_t n, std::uint32_t block,
                    std::uint8_t* scales, std::uint8_t* q, bool streams);

  // Copy past the caches: for outputs that will not be read before they would have left them. The thread must
  // pass a fence, or end, before another thread reads them.
  void (*stream)(const void* from, void* to, std::size_t bytes);
};

// A residual in 8 bits: the scales and the integers of an int8 message of blocks of kStateBlock.
constexpr std::uint32_t kStateBlock = 128;
struct State8 {
  std::uint8_t* scales;
  std::uint8_t* values;
  std::size_t n;
};

// Longest block that the fused functions below take.
constexpr std::uint32_t kLongestFused = 8192;

// Whether a codec is that of signs, which has functions of its own.
constexpr bool is_sign(const CodecIdentity& codec) { return codec.bits == 1; }

// Whether the fused functions below take a codec.
constexpr bool fusible(const CodecIdentity& codec) {
  return codec.block && codec.block <= kLongestFused && !is_sign(codec);
}

// Write the message of x + e, over `ranks` for a mean, to `out` and its error, times `ranks`, to `lost`, all
// in one pass; `n` elements. `lost` may be `e`. Returns the message's bytes; `finite` tells whether all of
// `lost` is.
std::size_t encode_residual(const Kernels& k, const CodecIdentity& codec, const Source& x, std::size_t n,
                            const std::uint8_t* e, std::uint8_t* lost, double ranks, int threads,
                            std::uint8_t* out, bool* finite);

// The same for signs, for an array that no cache holds; `lost` is not `e`.
std::size_t encode_signs(const Kernels& k, const CodecIdentity& codec, const Source& x, std::size_t n,
                         const std::uint8_t* e, std::uint8_t* lost, double ranks, int threads, Rooms& rooms,
                         std::uint8_t* out, bool* finite);

// The same for an array that the caches hold, in two passes: `e` becomes the error, unless that is not
// finite.
std::size_t encode_few_signs(const Kernels& k, const CodecIdentity& codec, const Source& x, std::size_t n,
                             std::uint8_t* e, double ranks, int threads, Rooms& rooms, std::uint8_t* out,
                             bool* finite);

// The same for a sparse codec whose values go as they are: `e` becomes the error. The caller has found x + e
// to be modest.
std::size_t encode_sparse_residual(const Kernels& k, const Encoder& encoder, const Source& x, std::size_t n,
                                   std::uint8_t* e, double ranks, int threads, std::uint8_t* out);

// Bytes from which on a residual bypasses the caches.
constexpr std::size_t kStreamed = std::size_t(4) << 20;

// The same as encode_residual with the moving average of elements start .. start + n of `state`, which must
// be whole blocks of it, and a codec whose tile (see fused_tile) is whole blocks too. The new state is
// written to `fresh` (state_bytes of the span) and from there to the state if all is finite.
std::size_t encode_average(const Kernels& k, const CodecIdentity& codec, const std::uint8_t* x,
                           DTypeCode dtype, std::size_t start, std::size_t n, const State8& state,
                           std::uint8_t* fresh, double beta, int threads, std::uint8_t* out, bool* finite);

// Elements that encode_residual and encode_average take at a time: few, so that memory is read all the while.
constexpr std::size_t fused_tile(std::uint32_t block) { return block <= 256 ? 256 / block * block : block; }

// Compute out = x + elements start .. start + n of the state, n elements.
void correct_average(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t start,
                     std::size_t n, const State8& state, std::uint8_t* out, int threads);

// Take a message's error into the state's moving average; `fresh` as above. Returns whether all is finite.
bool keep_average(const Kernels& k, const std::uint8_t* corrected, const std::uint8_t* decoded, bool wide,
                  std::size_t start, std::size_t n, const State8& state, std::uint8_t* fresh, double weight,
                  double beta, int threads);

// Bytes of a state's scales, and of `fresh` for a span, which is whole blocks.
constexpr std::size_t state_scales(std::size_t n, bool wide) {
  return blocks_of(n, kStateBlock) * (wide ? 8 : 4);
}
constexpr std::size_t state_bytes(std::size_t start, std::size_t n, bool wide) {
  return state_scales(start % kStateBlock + n, wide) +
         blocks_of(start % kStateBlock + n, kStateBlock) * kStateBlock;
}

}  // namespace hybridcomp
