// The table of kernels that one instruction set provides. All pointers are host memory of the caller, of any
// alignment, and may not overlap. Sizes are in elements unless said otherwise. No kernel allocates, and none
// reads or writes outside the sizes it is given; what comes from a message is checked where it is used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "crc32c.hpp"
#include "hybridcomp/wire.hpp"

namespace hybridcomp {

// What a decoder found wrong with a payload. 0 is success.
enum Status : int {
  kOk = 0,
  kBadLength = 1,      // the payload is not as long as its counts say
  kBadBlock = 2,       // a block size out of range, or reserved bits set
  kBadIndexCount = 3,  // the blocks' counts do not add up to the number of values
  kBadIndexOrder = 4,  // indices of a block not strictly ascending
  kBadIndexRange = 5,  // an index, or a bit of a bitmap, past the end of its block
  kBadBitmap = 6,      // a bitmap with another number of bits than its block's count
};

// Exactly k elements of largest magnitude: those with magnitude >= `all`, and of those with magnitude ==
// `tie` the first `ties`.
struct Selection {
  std::uint64_t all;
  std::uint64_t tie;
  std::uint64_t ties;
};

struct Kernels {
  const char* name;
  Crc32cFn crc32c;

  // Quantize `n` elements (whole blocks; the last may be short) to `bits` (8 or 4). Writes a scale per block
  // to `scales` and the packed integers to `packed`.
  void (*quantize)(const void* src, DTypeCode dtype, std::size_t n, std::uint32_t block, int bits,
                   std::uint8_t* scales, std::uint8_t* packed);

  // The inverse, writing to or adding to `out` of `out_dtype`. `wide`: the message is of doubles. With `add`,
  // `out_dtype` is kFloat32, or kFloat64 when `wide`.
  void (*dequantize)(const std::uint8_t* scales, const std::uint8_t* packed, bool wide, std::size_t n,
                     std::uint32_t block, int bits, void* out, DTypeCode out_dtype, bool add);

  // Convert, or with `add` (dst_dtype kFloat32 or kFloat64) add, `n` floats of one type to another.
  void (*convert)(const void* src, DTypeCode src_dtype, void* dst, DTypeCode dst_dtype, std::size_t n,
                  bool add);

  // The k (1 .. n) elements of largest magnitude, ties to the lower index. NaN is the largest.
  Selection (*topk_threshold)(const void* src, DTypeCode dtype, std::size_t n, std::size_t k);

  // Write the magnitudes of at least `low` to `keys`, as integers of dtype's size, and return how many; if
  // they may be more than `capacity`, capacity + 1.
  std::size_t (*topk_candidates)(const void* src, DTypeCode dtype, std::size_t n, std::uint64_t low,
                                 void* keys, std::size_t capacity);

  // Of one block of at most 65,536 elements write the selected indices, ascending, to `indices` and return
  // how many. `selection->ties` is counted down.
  std::size_t (*topk_collect)(const void* src, DTypeCode dtype, std::size_t n, Selection* selection,
                              std::uint16_t* indices);

  // p[i][k] = sum over j of m[i][j] * q[k][j]: m is row-major [rows][cols] of which the first n elements
  // exist and the rest count as zero; q is [rank][cols], p is [rows][rank]. Aligned to 4 bytes, as are those
  // below.
  void (*project)(const float* m, std::size_t n, std::size_t rows, std::size_t cols, std::size_t rank,
                  const float* q, float* p);

  // q[k][j] = sum over i of m[i][j] * p[i][k].
  void (*project_back)(const float* m, std::size_t n, std::size_t rows, std::size_t cols, std::size_t rank,
                       const float* p, float* q);

  // m[i][j] = (or with `add` +=) sum over k of p[i][k] * q[k][j], the first n elements.
  void (*reconstruct)(const float* p, const float* q, std::size_t n, std::size_t rows, std::size_t cols,
                      std::size_t rank, float* m, bool add);

  // Orthonormalize `rank` vectors of `rows` elements, one after another: v is [rank][rows]. A vector that
  // depends on those before it becomes zero; non-finite values spread to the vectors after them.
  void (*orthogonalize)(float* v, std::size_t rows, std::size_t rank);
};

// Best first.
const Kernels* const* available_kernels(std::size_t* count);

const Kernels& kernels();                // in use
bool use_kernels(const char* isa_name);  // false: this CPU does not have them

constexpr std::size_t blocks_of(std::size_t n, std::size_t block) { return n / block + (n % block != 0); }

// Bytes of the packed integers of n elements: a 4-bit block of odd length ends with half a byte unused.
constexpr std::size_t packed_bytes(std::size_t n, std::uint32_t block, int bits) {
  if (bits == 8) return n;
  return n / block * (block / 2) + (n % block + 1) / 2;
}

}  // namespace hybridcomp
