#include "codecs/lossless/planes.hpp"

#include <algorithm>
#include <cstring>

#include "codecs/convert/convert.hpp"

namespace hybridcomp {
namespace {

std::uint64_t load_rotated(const std::uint8_t* p, int width, bool rotate) {
  std::uint64_t x = 0;
  std::memcpy(&x, p, static_cast<std::size_t>(width));
  if (!rotate) return x;
  if (width == 2) return rotated(static_cast<std::uint16_t>(x));
  if (width == 4) return rotated(static_cast<std::uint32_t>(x));
  return rotated(x);
}

}  // namespace

unsigned compressible_planes(const std::uint8_t* src, std::size_t m, int width, bool rotate) {
  std::uint16_t counts[kMaxPlanes][256] = {};
  const std::size_t runs = m <= kSampleRuns * kSampleRun ? 1 : kSampleRuns;
  const std::size_t run = runs == 1 ? m : kSampleRun;
  for (std::size_t r = 0; r < runs; ++r) {
    const std::size_t begin = runs == 1 ? 0 : (m - run) * r / (runs - 1);
    for (std::size_t i = begin; i < begin + run; ++i) {
      std::uint64_t x = load_rotated(src + i * static_cast<std::size_t>(width), width, rotate);
      for (int k = 0; k < width; ++k, x >>= 8) ++counts[k][x & 255];
    }
  }
  unsigned found = 0;
  for (int k = 0; k < width; ++k) {
    std::uint64_t pairs = 0;
    for (const std::uint64_t c : counts[k]) pairs += c * (c - (c != 0));
    if (compressible(pairs, runs * run)) found |= 1u << k;
  }
  return found;
}

void join_planes_as(const Kernels& k, const std::uint8_t* const* planes, std::size_t m, DTypeCode dtype,
                    std::uint8_t* out, DTypeCode out_dtype, bool add) {
  constexpr std::size_t kTile = 1024;
  alignas(64) std::uint8_t values[kTile * 8];
  const int width = static_cast<int>(size_of(dtype));
  for (std::size_t at = 0; at < m; at += kTile) {
    const std::size_t n = std::min(kTile, m - at);
    const std::uint8_t* here[kMaxPlanes];
    for (int i = 0; i < width; ++i) here[i] = planes[i] + at;
    k.planes->join(here, n, width, true, values);
    k.convert->convert(values, dtype, out + at * size_of(out_dtype), out_dtype, n, add);
  }
}

}  // namespace hybridcomp
