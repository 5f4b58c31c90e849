#include "codecs/lattice/message.hpp"

#include <cmath>

#include "codecs/messages/codec_entry.hpp"
#include "codecs/messages/fixed.hpp"
#include "hybridcomp/lattice.hpp"

namespace hybridcomp {
namespace {

template <int Bits>
LatticeScale scale_of(std::uint64_t peak, DTypeCode dtype, std::uint32_t ranks) {
  const std::int32_t limit = lattice_limit(Bits, ranks);
  if (dtype == kFloat64) {
    const auto s = lattice_scale<double, Bits>(peak, limit);
    return {s.stored, s.inverse};
  }
  const auto s = lattice_scale<float, Bits>(static_cast<std::uint32_t>(peak), limit);
  return {static_cast<double>(s.stored), static_cast<double>(s.inverse)};
}

}  // namespace

LatticeScale lattice_scale_of(std::uint64_t peak, DTypeCode dtype, int bits, std::uint32_t ranks) {
  if (bits == 8) return scale_of<8>(peak, dtype, ranks);
  if (bits == 16) return scale_of<16>(peak, dtype, ranks);
  return scale_of<32>(peak, dtype, ranks);
}

std::uint64_t lattice_peak(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                           int threads) {
  std::uint64_t peaks[kMaxThreads];
  const int ranges = ranges_of(n, kGroup, threads);
  split(n, kGroup, ranges, [&](int r, std::size_t begin, std::size_t end) {
    peaks[r] = k.lattice->peak(src + begin * size_of(dtype), dtype, end - begin);
  });
  return *std::max_element(peaks, peaks + ranges);
}

void lattice_quantize(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int bits,
                      const LatticeRounding& rounding, int threads, std::uint8_t* q) {
  const std::size_t width = static_cast<std::size_t>(bits / 8);
  split(n, kGroup, ranges_of(n, kGroup, threads), [&](int, std::size_t begin, std::size_t end) {
    k.lattice->quantize(src + begin * size_of(dtype), dtype, end - begin, bits, rounding, begin,
                        q + begin * width);
  });
}

void lattice_dequantize(const Kernels& k, const std::uint8_t* q, DTypeCode dtype, std::size_t n, int bits,
                        double scale, int threads, std::uint8_t* out, DTypeCode out_dtype, bool add) {
  const std::size_t width = static_cast<std::size_t>(bits / 8);
  split(n, kGroup, ranges_of(n, kGroup, threads), [&](int, std::size_t begin, std::size_t end) {
    k.lattice->dequantize(q + begin * width, dtype, end - begin, bits, scale,
                          out + begin * size_of(out_dtype), out_dtype, add);
  });
}

std::size_t lattice_message(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                            const LatticePrefix& prefix, const LatticeRounding& rounding, CodecId id,
                            int threads, std::uint8_t* out) {
  const int bits = static_cast<int>(prefix.bits);
  return write_fixed(
      k, {id, dtype, &prefix, sizeof(prefix)}, n, 1, threads, out, [](std::size_t) { return std::size_t(0); },
      [&](std::size_t e) { return e * static_cast<std::size_t>(bits / 8); },
      [&](std::size_t at, std::size_t m, std::uint8_t*, std::uint8_t* q) {
        k.lattice->quantize(src + at * size_of(dtype), dtype, m, bits, rounding, at, q);
      });
}

namespace {

Encoder make(CodecId id, const Parameters& parameters) {
  const int bits = parameters.whole<int>("bits", 8, 32);
  if (!valid_bits(bits)) Parameters::refuse("bits", "8, 16 or 32");
  const auto ranks = parameters.whole<std::uint32_t>("ranks", 1, lattice_most(bits));
  const auto seed = parameters.whole<std::uint64_t>("seed", 0, ~std::uint64_t(0));
  const bool stochastic = parameters.word("rounding") == "stochastic";
  return {{id},
          [=](std::size_t n, DTypeCode) { return lattice_message_bytes(n, bits); },
          [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
              std::uint8_t* out) {
            const std::uint64_t peak = lattice_peak(k, src, dtype, n, threads);
            const LatticeScale s = lattice_scale_of(peak, dtype, bits, ranks);
            return lattice_message(k, src, dtype, n, {static_cast<std::uint32_t>(bits), ranks, 1, 0, s.scale},
                                   lattice_rounding(ranks, bits, s.inverse, stochastic, seed), id, threads,
                                   out);
          }};
}

// Check a payload and read its prefix; returns a Status.
int open(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n,
         LatticePrefix* prefix) {
  if (bytes < sizeof(*prefix)) return kBadLength;
  std::memcpy(prefix, payload, sizeof(*prefix));
  const LatticePrefix& p = *prefix;
  if (p.bits > 32 || !valid_bits(static_cast<int>(p.bits)) || p.reserved) return kBadLattice;
  if (p.ranks == 0 || p.ranks > lattice_most(static_cast<int>(p.bits)) || p.parts == 0 || p.parts > p.ranks)
    return kBadLattice;
  const bool narrow = dtype != kFloat64 && p.bits != 32;  // its scale is a float
  const bool odd =
      p.scale < 0 || std::isinf(p.scale) ||
      (narrow && p.scale == p.scale && static_cast<double>(static_cast<float>(p.scale)) != p.scale);
  if (odd) return kBadScale;
  if (n > bytes) return kBadLength;  // before n enters any arithmetic that could overflow
  return bytes - sizeof(p) == n * (p.bits / 8) ? kOk : kBadLength;
}

int check(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n) {
  LatticePrefix prefix;
  return open(payload, bytes, dtype, n, &prefix);
}

int decode(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n,
           int threads, std::uint8_t* out, DTypeCode out_dtype, bool add) {
  LatticePrefix prefix;
  const int status = open(payload, bytes, dtype, n, &prefix);
  if (status == kOk)
    lattice_dequantize(k, payload + sizeof(prefix), dtype, n, static_cast<int>(prefix.bits), prefix.scale,
                       threads, out, out_dtype, add);
  return status;
}

}  // namespace

extern const CodecEntry kLatticeCodec = {.id = 33, .encoder = make, .check_head = check, .decode = decode};

}  // namespace hybridcomp
