#include "engine/fold.hpp"

#include <algorithm>

namespace hybridcomp::engine {
namespace {

template <typename T>
void fold_all(Fold fold, const std::uint8_t* from_bytes, std::uint8_t* into_bytes, std::size_t n) {
  const T* const from = reinterpret_cast<const T*>(from_bytes);
  T* const into = reinterpret_cast<T*>(into_bytes);
  switch (fold) {
    case Fold::kSum:
      for (std::size_t i = 0; i < n; ++i) into[i] = static_cast<T>(into[i] + from[i]);
      return;
    case Fold::kMax:
      for (std::size_t i = 0; i < n; ++i) into[i] = std::max(into[i], from[i]);
      return;
    default:
      for (std::size_t i = 0; i < n; ++i) into[i] = static_cast<T>(into[i] | from[i]);
  }
}

}  // namespace

bool folds(Fold fold, int dtype) {
  if (dtype < kUint8 || !bytes_of(dtype)) return false;
  const bool without_sign = dtype == kUint8 || dtype >= kUint16;
  return fold == Fold::kSum || (without_sign && (fold == Fold::kMax || fold == Fold::kOr));
}

void fold_into(Fold fold, std::size_t size, const std::uint8_t* from, std::uint8_t* into, std::size_t n) {
  switch (size) {
    case 1:
      return fold_all<std::uint8_t>(fold, from, into, n);
    case 2:
      return fold_all<std::uint16_t>(fold, from, into, n);
    case 4:
      return fold_all<std::uint32_t>(fold, from, into, n);
    default:
      return fold_all<std::uint64_t>(fold, from, into, n);
  }
}

}  // namespace hybridcomp::engine
