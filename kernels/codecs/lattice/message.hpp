// Whole tensors and messages of the shared-scale quantizer, over threads.
#pragma once

#include "codecs/common/kernels.hpp"
#include "codecs/lattice/lattice.hpp"
#include "codecs/messages/codec_identity.hpp"

namespace hybridcomp {

// Prefix of the payload; an integer of `bits` bits per element follows.
struct LatticePrefix {
  std::uint32_t bits;      // 8, 16 or 32
  std::uint32_t ranks;     // contributions that the integers have room for
  std::uint32_t parts;     // contributions that are in the integers
  std::uint32_t reserved;  // zero
  double scale;            // value = integer * scale; NaN where a value was not finite
};
static_assert(sizeof(LatticePrefix) == 24, "lattice's prefix is 24 bytes on the wire");

constexpr bool valid_bits(int bits) { return bits == 8 || bits == 16 || bits == 32; }

// Return the largest integer of so many bits: as many contributions as there is room for.
constexpr std::uint32_t lattice_most(int bits) { return (1u << (bits - 1)) - 1u; }

// Return the rounding of one of `ranks` contributions.
constexpr LatticeRounding lattice_rounding(std::uint32_t ranks, int bits, double inverse, bool stochastic,
                                           std::uint64_t seed) {
  return {static_cast<std::int32_t>(lattice_most(bits) / ranks), inverse, stochastic, seed};
}

struct LatticeScale {
  double scale, inverse;
};

// Return the scale for a largest magnitude (LatticeKernels::peak). ranks <= 2^(bits - 1) - 1.
LatticeScale lattice_scale_of(std::uint64_t peak, DTypeCode dtype, int bits, std::uint32_t ranks);

std::uint64_t lattice_peak(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                           int threads);

// Write the integers alone, for an all-reduce.
void lattice_quantize(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int bits,
                      const LatticeRounding& rounding, int threads, std::uint8_t* q);
void lattice_dequantize(const Kernels& k, const std::uint8_t* q, DTypeCode dtype, std::size_t n, int bits,
                        double scale, int threads, std::uint8_t* out, DTypeCode out_dtype, bool add);

// Write the message of `n` elements to `out`; returns its bytes.
std::size_t lattice_message(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                            const LatticePrefix& prefix, const LatticeRounding& rounding, CodecId id,
                            int threads, std::uint8_t* out);
constexpr std::size_t lattice_message_bytes(std::size_t n, int bits) {
  return sizeof(Header) + sizeof(LatticePrefix) + n * static_cast<std::size_t>(bits / 8);
}

}  // namespace hybridcomp
