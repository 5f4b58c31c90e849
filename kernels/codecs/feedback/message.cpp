// Error feedback around block quantizers: correction, message and its error, tile by tile in L1.
#include <atomic>

#include "codecs/block/block.hpp"
#include "codecs/block/message.hpp"
#include "codecs/common/rooms.hpp"
#include "codecs/feedback/feedback.hpp"
#include "codecs/messages/fixed.hpp"
#include "codecs/sign/sign.hpp"

namespace hybridcomp {
namespace {

constexpr BlockFormat kStateFormat{kStateBlock, 8, true, false, 0};
constexpr std::size_t kStep = 2048;  // elements of a state's tile: a multiple of kStateBlock

std::size_t scale_bytes(bool wide) { return wide ? 8 : 4; }
DTypeCode sum_type(bool wide) { return wide ? kFloat64 : kFloat32; }

// The part of a state that holds elements start .. start + n, in whole blocks, and its fresh copy.
struct Window {
  Window(const Kernels& kernels, const State8& whole, std::size_t start, std::size_t n, bool is_wide,
         std::uint8_t* fresh)
      : k(kernels),
        state(whole),
        wide(is_wide),
        first(start - start % kStateBlock),
        last(std::min(whole.n, (start + n + kStateBlock - 1) / kStateBlock * kStateBlock)),
        fresh_scales(fresh),
        fresh_values(fresh + state_scales(last - first, is_wide)) {}

  // Read elements at .. at + m of the state as values; `at` begins a block.
  void read(std::size_t at, std::size_t m, std::uint8_t* values) const {
    k.block->dequantize(state.scales + at / kStateBlock * scale_bytes(wide), state.values + at, wide, m, 0,
                        kStateFormat, values, sum_type(wide), false);
  }

  // Write the same elements to the fresh copy.
  void write(std::size_t at, std::size_t m, const std::uint8_t* values) const {
    const std::size_t i = at - first;
    k.block->quantize(values, sum_type(wide), m, 0, kStateFormat, false,
                      fresh_scales + i / kStateBlock * scale_bytes(wide), fresh_values + i);
  }

  void commit() const {
    std::memcpy(state.scales + first / kStateBlock * scale_bytes(wide), fresh_scales,
                state_scales(last - first, wide));
    std::memcpy(state.values + first, fresh_values, last - first);
  }

  const Kernels& k;
  const State8& state;
  const bool wide;
  const std::size_t first, last;
  std::uint8_t* const fresh_scales;
  std::uint8_t* const fresh_values;
};

// Write the message of n corrected elements, tile by tile. correct(at, m, state, out) fills a tile, and may
// leave something in `state` for keep(at, m, state, corrected, decoded), which takes the decoded tile.
template <typename Correct, typename Keep>
std::size_t encode_tiles(const Kernels& k, const CodecIdentity& codec, DTypeCode dtype, std::size_t n,
                         int threads, std::uint8_t* out, Correct correct, Keep keep) {
  const bool wide = dtype == kFloat64;
  const std::size_t tile = fused_tile(codec.block);
  const BlockFormat format{codec.block, codec.bits, true, false, codec.seed};
  const QuantizePrefix prefix{codec.block, 0};
  const auto scales_of = [&](std::size_t e) { return blocks_of(e, codec.block) * scale_bytes(wide); };
  const auto packed_of = [&](std::size_t e) { return packed_bytes(e, codec.block, codec.bits); };
  return write_fixed(
      k, {codec.id, sum_type(wide), &prefix, sizeof(prefix)}, n, tile, threads, out, scales_of, packed_of,
      [&](std::size_t at, std::size_t m, std::uint8_t* scales, std::uint8_t* packed) {
        alignas(64) std::uint8_t corrected[kLongestFused * 8], decoded[kLongestFused * 8];
        alignas(64) std::uint8_t state[kLongestFused * 8];
        for (std::size_t i = 0; i < m; i += tile) {
          const std::size_t len = std::min(tile, m - i);
          std::uint8_t* const s = scales + scales_of(i);
          std::uint8_t* const p = packed + packed_of(i);
          correct(at + i, len, state, corrected);
          k.block->quantize(corrected, sum_type(wide), len, at + i, format, codec.stochastic, s, p);
          k.block->dequantize(s, p, wide, len, 0, format, decoded, sum_type(wide), false);
          keep(at + i, len, state, corrected, decoded);
        }
      });
}

}  // namespace

std::size_t encode_residual(const Kernels& k, const CodecIdentity& codec, const Source& x, std::size_t n,
                            const std::uint8_t* e, std::uint8_t* lost, double ranks, int threads,
                            std::uint8_t* out, bool* finite) {
  const bool wide = x.dtype == kFloat64;
  const std::size_t size = scale_bytes(wide);
  const bool streams = n * size >= kStreamed;
  std::atomic<bool> good{true};
  if (codec.bits == 8 && !codec.stochastic && codec.block <= kLongestTile && ranks == 1) {
    const QuantizePrefix prefix{codec.block, 0};
    const std::size_t bytes = write_fixed(
        k, {codec.id, sum_type(wide), &prefix, sizeof(prefix)}, n, fused_tile(codec.block), threads, out,
        [&](std::size_t m) { return blocks_of(m, codec.block) * size; }, [](std::size_t m) { return m; },
        [&](std::size_t at, std::size_t m, std::uint8_t* scales, std::uint8_t* q) {
          if (!k.feedback->quantize8(x.from(at), e + at * size, lost + at * size, m, codec.block, scales, q,
                                     streams))
            good = false;
        });
    if (streams) std::atomic_thread_fence(std::memory_order_seq_cst);
    *finite = good;
    return bytes;
  }
  const std::size_t bytes = encode_tiles(
      k, codec, x.dtype, n, threads, out,
      [&](std::size_t at, std::size_t m, std::uint8_t*, std::uint8_t* corrected) {
        k.feedback->add(x.from(at), e + at * size, corrected, m, false);
        if (ranks != 1) k.feedback->divide(corrected, wide, m, ranks);
      },
      [&](std::size_t at, std::size_t m, std::uint8_t*, std::uint8_t* corrected, std::uint8_t* decoded) {
        std::uint8_t* const to = streams ? decoded : lost + at * size;
        if (!k.feedback->lose(corrected, decoded, to, wide, m, ranks)) good = false;
        if (streams) k.feedback->stream(decoded, lost + at * size, m * size);
      });
  if (streams) std::atomic_thread_fence(std::memory_order_seq_cst);  // on this thread; the others have ended
  *finite = good;
  return bytes;
}

namespace {

// Write the message of signs; f(at, m, means, bits) encodes stretches of whole blocks.
template <typename F>
std::size_t write_signs(const Kernels& k, const CodecIdentity& codec, DTypeCode dtype, std::size_t n,
                        std::size_t stretch, int threads, std::uint8_t* out, F f) {
  const bool wide = dtype == kFloat64;
  const QuantizePrefix prefix{codec.block, 0};
  return write_fixed(
      k, {codec.id, sum_type(wide), &prefix, sizeof(prefix)}, n, stretch, threads, out,
      [&](std::size_t e) { return blocks_of(e, codec.block) * scale_bytes(wide); },
      [](std::size_t e) { return (e + 7) / 8; }, f);
}

}  // namespace

std::size_t encode_signs(const Kernels& k, const CodecIdentity& codec, const Source& x, std::size_t n,
                         const std::uint8_t* e, std::uint8_t* lost, double ranks, int threads, Rooms& rooms,
                         std::uint8_t* out, bool* finite) {
  // Blocks between whose two passes the other blocks' lie: the first and the last of a stretch have none.
  constexpr std::size_t kBlocks = 16;
  const std::size_t size = scale_bytes(x.dtype == kFloat64);
  std::atomic<bool> good{true};
  const std::size_t bytes =
      write_signs(k, codec, x.dtype, n, kBlocks * codec.block, threads, out,
                  [&](std::size_t at, std::size_t m, std::uint8_t* means, std::uint8_t* bits) {
                    const Lease room(rooms, 2 * codec.block * size);
                    if (!k.sign->residual({x.from(at), e + at * size, ranks}, m, codec.block, room.data(),
                                          lost + at * size, means, bits))
                      good = false;
                  });
  std::atomic_thread_fence(std::memory_order_seq_cst);  // on this thread; the others have ended
  *finite = good;
  return bytes;
}

std::size_t encode_few_signs(const Kernels& k, const CodecIdentity& codec, const Source& x, std::size_t n,
                             std::uint8_t* e, double ranks, int threads, Rooms& rooms, std::uint8_t* out,
                             bool* finite) {
  const bool wide = x.dtype == kFloat64;
  const std::size_t size = scale_bytes(wide), block = codec.block;
  const Lease corrected(rooms, n * size);
  std::atomic<bool> modest{true}, good{true};
  const std::size_t bytes =
      write_signs(k, codec, x.dtype, n, block, threads, out,
                  [&](std::size_t at, std::size_t m, std::uint8_t* means, std::uint8_t* bits) {
                    if (!k.sign->correct({x.from(at), e + at * size, ranks}, m, codec.block,
                                         corrected.data() + at * size, means, bits))
                      modest = false;
                  });
  const std::uint8_t* const means = out + sizeof(Header) + sizeof(QuantizePrefix);
  std::uint8_t* const to = modest ? e : corrected.data();  // what is not finite must not get there
  split(n, block, ranges_of(n, block, threads), [&](int, std::size_t begin, std::size_t end) {
    if (!k.sign->lose(corrected.data() + begin * size, means + begin / block * size, wide, end - begin,
                      codec.block, ranks, to + begin * size))
      good = false;
  });
  *finite = good;
  if (good && !modest) std::memcpy(e, to, n * size);
  return bytes;
}

std::size_t encode_average(const Kernels& k, const CodecIdentity& codec, const std::uint8_t* x,
                           DTypeCode dtype, std::size_t start, std::size_t n, const State8& state,
                           std::uint8_t* fresh, double beta, int threads, std::uint8_t* out, bool* finite) {
  const bool wide = dtype == kFloat64;
  const Window window(k, state, start, n, wide, fresh);
  std::atomic<bool> good{true};
  const std::size_t bytes = encode_tiles(
      k, codec, dtype, n, threads, out,
      [&](std::size_t at, std::size_t m, std::uint8_t* e, std::uint8_t* corrected) {
        window.read(start + at, m, e);
        k.feedback->add(Source{x, dtype}.from(at), e, corrected, m, false);
      },
      [&](std::size_t at, std::size_t m, std::uint8_t* e, std::uint8_t* corrected, std::uint8_t* decoded) {
        if (!k.feedback->average(corrected, decoded, e, wide, m, 1.0, beta)) good = false;
        window.write(start + at, m, e);
      });
  *finite = good;
  if (good) window.commit();
  return bytes;
}

void correct_average(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t start,
                     std::size_t n, const State8& state, std::uint8_t* out, int threads) {
  const bool wide = dtype == kFloat64;
  const std::size_t size = scale_bytes(wide);
  const Window window(k, state, start, n, wide, nullptr);
  const std::size_t span = window.last - window.first;
  split(span, kStep, ranges_of(span, kStep, threads), [&](int, std::size_t begin, std::size_t end) {
    alignas(64) std::uint8_t e[kStep * 8];
    for (std::size_t at = window.first + begin; at < window.first + end; at += kStep) {
      const std::size_t m = std::min(kStep, window.first + end - at);
      const std::size_t low = std::max(at, start), high = std::min(at + m, start + n);
      window.read(at, m, e);
      k.feedback->add(Source{x, dtype}.from(low - start), e + (low - at) * size, out + (low - start) * size,
                      high - low, false);
    }
  });
}

bool keep_average(const Kernels& k, const std::uint8_t* corrected, const std::uint8_t* decoded, bool wide,
                  std::size_t start, std::size_t n, const State8& state, std::uint8_t* fresh, double weight,
                  double beta, int threads) {
  const std::size_t size = scale_bytes(wide);
  const Window window(k, state, start, n, wide, fresh);
  const std::size_t span = window.last - window.first;
  std::atomic<bool> good{true};
  split(span, kStep, ranges_of(span, kStep, threads), [&](int, std::size_t begin, std::size_t end) {
    alignas(64) std::uint8_t e[kStep * 8];
    for (std::size_t at = window.first + begin; at < window.first + end; at += kStep) {
      const std::size_t m = std::min(kStep, window.first + end - at);
      const std::size_t low = std::max(at, start), high = std::min(at + m, start + n);
      window.read(at, m, e);
      if (!k.feedback->average(corrected + (low - start) * size, decoded + (low - start) * size,
                               e + (low - at) * size, wide, high - low, weight, beta))
        good = false;
      window.write(at, m, e);
    }
  });
  if (good) window.commit();
  return good;
}

}  // namespace hybridcomp
