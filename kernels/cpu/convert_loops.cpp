// Conversions between the four floating-point types; compiled once per instruction set.
#include "convert.hpp"
#include "tile.hpp"

namespace hybridcomp::HC_ISA {
namespace {

template <DTypeCode S, DTypeCode D>
void convert_all(const std::uint8_t* src, std::uint8_t* dst, std::size_t n, bool add) {
  alignas(64) ComputeOf<S> buffer[kTile];
  for (std::size_t at = 0; at < n; at += kTile) {
    const std::size_t m = smaller(kTile, n - at);
    const ComputeOf<S>* values = view<S>(src + at * sizeof(StorageOf<S>), m, buffer);
    std::uint8_t* out = dst + at * sizeof(StorageOf<D>);
    if constexpr (D == kFloat32 || D == kFloat64) {
      if (add) {
        store_add<D>(values, out, m);
        continue;
      }
    }
    store<D>(values, out, m);
  }
}

void convert(const void* src, DTypeCode src_dtype, void* dst, DTypeCode dst_dtype, std::size_t n, bool add) {
  const auto* from = static_cast<const std::uint8_t*>(src);
  auto* to = static_cast<std::uint8_t*>(dst);
  if (src_dtype == dst_dtype && !add) {  // bit for bit, NaN payloads too
    const std::size_t size = src_dtype == kFloat64 ? 8 : src_dtype == kFloat32 ? 4 : 2;
    if (n) std::memcpy(to, from, n * size);
    return;
  }
  with_dtype(src_dtype, [&]<DTypeCode S>() {
    with_dtype(dst_dtype, [&]<DTypeCode D>() { convert_all<S, D>(from, to, n, add); });
  });
}

}  // namespace

extern const ConvertKernels convert_kernels;
const ConvertKernels convert_kernels = {convert};

}  // namespace hybridcomp::HC_ISA
