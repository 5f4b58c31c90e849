// Wire format of codec `exponent`, for host and device.
//
// The top 16 bits of an element, rotated left by one, are its exponent above the rest of them: some of the
// mantissa, and the sign. Trained values are near Gaussian: of 256 such values, all but one in forty have
// exponents within seven of the largest. So an exponent is stored as its distance below the block's largest,
// in three or four bits, and all other bits as they are.
//
// Payload: a code for each block of 256 elements, a byte; then the blocks' data, one after another. For types
// that are not floating-point: the elements.
//
// A code tells how a block is stored (ExponentForm). Below kExponentZeros its lower bits are the number of
// escapes, and the data are, little-endian and without gaps:
//   the rest of the top halves, element by element: a byte each; for float16 the lower byte each, then the
//     upper 3 bits as fields; for float64 the lower 4 bits as fields, then the fifth bit as fields;
//   the bits below the top halves: for float32 16 each; for float64 the lower 32 each, then 16 each;
//   the distances as fields of 3 or 4 bits. The largest field is an escape: the exponent is in the list. With
//     `zero` the field below that one stands for the exponent 0, whatever the distance;
//   the largest exponent, and the exponents of the escapes in the elements' order: a byte each, for float64
//   two.
//
// Fields of a block are packed so that a vector of 32 bytes, or 32 threads, takes them apart in place: bytes
// come in rows of 32, and byte j of a row holds fields of elements j, j + 32, ..., j + 224, which are f0 ..
// f7.
//   1 bit:  one row, f0 + 2 f1 + ... + 128 f7
//   3 bits: f0 + 8 f1 + 64 (f6 mod 4); f2 + 8 f3 + 64 (f7 mod 4); f4 + 8 f5 + 64 (f6 / 4) + 128 (f7 / 4)
//   4 bits: f0 + 16 f1; f2 + 16 f3; f4 + 16 f5; f6 + 16 f7
//
// Elements that are less than a block are stored as they are, or are zeros.
#pragma once

#include "hybridcomp/arithmetic.hpp"
#include "hybridcomp/wire.hpp"

namespace hybridcomp {

constexpr std::size_t kExponentBlock = 256;  // elements that share a largest exponent
constexpr std::size_t kExponentRow = 32;     // bytes of a row of fields

constexpr std::uint8_t kExponentZeros = 254;  // every bit of the block is zero: no data
constexpr std::uint8_t kExponentRaw = 255;    // the elements as they are

// With at most so many escapes from fields of 3 bits no other form is tried.
constexpr std::uint32_t kExponentFew = 16;

// Form in which the codes from `first` on store a block.
struct ExponentForm {
  std::uint8_t first;  // the code for no escapes
  std::uint8_t most;   // most escapes
  std::uint8_t bits;   // bits of a field
  bool zero;           // a field stands for the exponent 0
};
constexpr int kExponentForms = 3;
HC_HD constexpr ExponentForm exponent_form_at(int i) {  // of equally short forms the first is taken
  return i == 0   ? ExponentForm{0, 63, 3, false}
         : i == 1 ? ExponentForm{64, 63, 3, true}
                  : ExponentForm{128, 125, 4, true};
}

HC_HD constexpr ExponentForm exponent_form(std::uint8_t code) {  // below kExponentZeros
  return exponent_form_at(code < 64 ? 0 : code < 128 ? 1 : 2);
}

HC_HD constexpr std::uint32_t exponent_escape(ExponentForm form) { return (1u << form.bits) - 1; }

// Return the field of an exponent; the escape if it has none.
HC_HD std::uint32_t exponent_field(std::uint32_t exponent, std::uint32_t largest, ExponentForm form) {
  const std::uint32_t escape = exponent_escape(form), distance = largest - exponent;
  if (form.zero && !exponent) return escape - 1;
  return distance < escape - form.zero ? distance : escape;
}

// Return the bits of a type's exponents, and the bits beside them in the top halves.
HC_HD constexpr int exponent_bits(DTypeCode dtype) {
  return dtype == kFloat64 ? 11 : dtype == kFloat16 ? 5 : 8;
}
HC_HD constexpr int exponent_rest_bits(DTypeCode dtype) { return 16 - exponent_bits(dtype); }

// Bytes of an element, and of an exponent in the data.
HC_HD constexpr std::size_t exponent_width(DTypeCode dtype) {
  return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2;
}
HC_HD constexpr std::size_t exponent_bytes(DTypeCode dtype) { return dtype == kFloat64 ? 2 : 1; }

// Offset of the fields in a block's data: bytes of the data before fields and exponents.
HC_HD constexpr std::size_t exponent_fields_at(DTypeCode dtype) {
  return kExponentBlock / 8 * static_cast<std::size_t>(exponent_rest_bits(dtype)) +
         kExponentBlock * (exponent_width(dtype) - 2);
}

// Bytes of a block in a form with so many escapes.
HC_HD std::size_t exponent_form_bytes(ExponentForm form, std::size_t escapes, DTypeCode dtype) {
  return exponent_fields_at(dtype) + kExponentRow * form.bits + exponent_bytes(dtype) * (1 + escapes);
}

// Bytes of the data of a block of m elements; kExponentNone if there is no such code, or if it saves no
// bytes.
constexpr std::size_t kExponentNone = 0x8000;
HC_HD std::size_t exponent_block_bytes(std::uint8_t code, std::size_t m, DTypeCode dtype) {
  const std::size_t raw = m * exponent_width(dtype);
  if (code == kExponentRaw) return raw;
  if (code == kExponentZeros) return 0;
  if (m != kExponentBlock) return kExponentNone;
  const ExponentForm form = exponent_form(code);
  const std::size_t bytes = exponent_form_bytes(form, static_cast<std::size_t>(code - form.first), dtype);
  return bytes < raw ? bytes : kExponentNone;
}

// Rotate a top half, and rotate it back.
HC_HD std::uint16_t exponent_rotated(std::uint16_t top) {
  return static_cast<std::uint16_t>((top << 1) | (top >> 15));
}
HC_HD std::uint16_t exponent_rotated_back(std::uint16_t turned) {
  return static_cast<std::uint16_t>((turned >> 1) | (turned << 15));
}

}  // namespace hybridcomp
