#include "codecs/bounded/huffman_code.hpp"

#include <algorithm>

namespace hybridcomp {
namespace {

constexpr std::uint32_t kSymbolBits = 12;  // low bits of a sort key (count, symbol)

// Write the depths in a Huffman tree of `used` ascending weights, at least two; equal weights keep their
// order. Each step joins the two smallest of leaves and inner nodes: both are ascending queues.
void tree_depths(const std::uint32_t* weights, std::size_t used, std::uint8_t* depths) {
  std::uint32_t inner[kMostSymbols];
  std::uint16_t parents[2 * kMostSymbols];  // parents of leaves, then of inner nodes
  std::size_t leaf = 0, oldest = 0, nodes = 0;
  const auto smallest = [&]() -> std::size_t {
    return oldest == nodes || (leaf < used && weights[leaf] <= inner[oldest]) ? leaf++ : used + oldest++;
  };
  const auto weight_of = [&](std::size_t node) { return node < used ? weights[node] : inner[node - used]; };
  while (nodes + 1 < used) {
    const std::size_t a = smallest(), b = smallest();
    inner[nodes] = weight_of(a) + weight_of(b);
    parents[a] = parents[b] = static_cast<std::uint16_t>(nodes++);
  }
  std::uint8_t inner_depths[kMostSymbols];
  inner_depths[nodes - 1] = 0;
  for (std::size_t i = nodes - 1; i-- > 0;)
    inner_depths[i] = static_cast<std::uint8_t>(inner_depths[parents[used + i]] + 1);
  for (std::size_t i = 0; i < used; ++i) depths[i] = static_cast<std::uint8_t>(inner_depths[parents[i]] + 1);
}

// Change how many codes there are of each number of bits until they are complete. Codes that were cut to
// kMostCodeBits take more room than there is: the longest of the others become a bit longer to make it. Room
// that is then left over goes to the longest codes, which become a bit shorter.
void complete(std::uint32_t* many) {
  std::uint32_t sum = 0;
  for (std::uint32_t b = 1; b <= kMostCodeBits; ++b) sum += many[b] << (kMostCodeBits - b);
  while (sum > kCodeStates) {
    std::uint32_t b = kMostCodeBits - 1;
    while (!many[b]) --b;
    --many[b];
    ++many[b + 1];
    sum -= 1u << (kMostCodeBits - 1 - b);
  }
  while (sum < kCodeStates) {
    std::uint32_t b = kMostCodeBits;
    while (!many[b]) --b;
    --many[b];
    ++many[b - 1];
    sum += 1u << (kMostCodeBits - b);
  }
}

std::uint16_t reversed(std::uint32_t code, std::uint32_t bits) {
  std::uint32_t r = 0;
  for (std::uint32_t i = 0; i < bits; ++i) r |= (code >> i & 1) << (bits - 1 - i);
  return static_cast<std::uint16_t>(r);
}

}  // namespace

void code_bits(const std::uint32_t* counts, std::size_t symbols, std::uint8_t* bits) {
  std::uint32_t keys[kMostSymbols], weights[kMostSymbols];
  std::size_t used = 0;
  for (std::size_t s = 0; s < symbols; ++s) {
    bits[s] = 0;
    if (counts[s]) keys[used++] = counts[s] << kSymbolBits | static_cast<std::uint32_t>(s);
  }
  std::sort(keys, keys + used);
  for (std::size_t i = 0; i < used; ++i) weights[i] = keys[i] >> kSymbolBits;
  std::uint8_t depths[kMostSymbols];
  tree_depths(weights, used, depths);

  std::uint32_t many[kMostCodeBits + 1] = {};
  for (std::size_t i = 0; i < used; ++i) ++many[std::min<std::uint32_t>(depths[i], kMostCodeBits)];
  complete(many);
  std::size_t at = used;  // the most frequent first
  for (std::uint32_t b = 1; b <= kMostCodeBits; ++b)
    for (; many[b]; --many[b]) bits[keys[--at] & ((1u << kSymbolBits) - 1)] = static_cast<std::uint8_t>(b);
}

bool is_complete(const std::uint8_t* bits, std::size_t symbols) {
  std::size_t sum = 0;
  for (std::size_t s = 0; s < symbols; ++s) {
    if (bits[s] > kMostCodeBits) return false;
    if (bits[s]) sum += kCodeStates >> bits[s];
  }
  return sum == kCodeStates;
}

void canonical_codes(const std::uint8_t* bits, std::size_t symbols, std::uint16_t* codes) {
  std::uint32_t next[kMostCodeBits + 2] = {};
  for (std::size_t s = 0; s < symbols; ++s) ++next[bits[s] + 1];  // next[b + 1]: codes of b bits
  next[1] = 0;
  std::uint32_t first = 0, shorter = 0;
  for (std::uint32_t b = 1; b <= kMostCodeBits; ++b) {
    const std::uint32_t many = next[b + 1];
    first = (first + shorter) << 1;
    shorter = many;
    next[b] = first;
  }
  for (std::size_t s = 0; s < symbols; ++s) codes[s] = bits[s] ? reversed(next[bits[s]]++, bits[s]) : 0;
}

void decoding_table(const std::uint8_t* bits, std::size_t symbols, std::uint16_t* table) {
  std::uint16_t codes[kMostSymbols];
  canonical_codes(bits, symbols, codes);
  for (std::size_t s = 0; s < symbols; ++s) {
    if (!bits[s]) continue;
    const auto entry = static_cast<std::uint16_t>(s << 4 | bits[s]);
    for (std::size_t at = codes[s]; at < kCodeStates; at += std::size_t(1) << bits[s]) table[at] = entry;
  }
}

}  // namespace hybridcomp
