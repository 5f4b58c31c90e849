// Canonical Huffman codes of at most 12 bits, lowest bit first.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hybridcomp {

constexpr std::uint32_t kMostCodeBits = 12;
constexpr std::size_t kCodeStates = std::size_t(1) << kMostCodeBits;
constexpr std::size_t kMostSymbols = 2049;

// Find the number of bits of each symbol's code, 0 for symbols that never come. At least two of the counts
// are not 0; there are up to kMostSymbols, each at most 2^19.
void code_bits(const std::uint32_t* counts, std::size_t symbols, std::uint8_t* bits);

// Whether these numbers of bits make one complete code of up to kMostCodeBits.
bool is_complete(const std::uint8_t* bits, std::size_t symbols);

// Write the codes of a complete code: shorter ones first, then by symbol; the first bit of each is its
// lowest.
void canonical_codes(const std::uint8_t* bits, std::size_t symbols, std::uint16_t* codes);

// Write a complete code's decoding table, indexed by the next kMostCodeBits of a stream: symbol * 16 + bits
// of its code.
void decoding_table(const std::uint8_t* bits, std::size_t symbols, std::uint16_t* table);

}  // namespace hybridcomp
