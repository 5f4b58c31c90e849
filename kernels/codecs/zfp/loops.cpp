// zfp's fixed-rate streams; compiled once per instruction set. Blocks are coded one after another
// (blocks.hpp); with AVX-512, and floats with AVX2, those of up to 128 bits go many at a time (lanes.hpp).
#include "hybridcomp/zfp.hpp"

#include "codecs/common/tile.hpp"
#include "codecs/zfp/blocks.hpp"
#include "codecs/zfp/decode_lanes.hpp"
#include "codecs/zfp/encode_lanes.hpp"
#include "codecs/zfp/zfp.hpp"

namespace hybridcomp::HC_ISA {
namespace {

static_assert(kTile % kZfpUnit == 0);

// Encode the first of m values many blocks at a time, where vectors can; returns how many values.
template <typename T>
std::size_t encode_groups([[maybe_unused]] const T* x, [[maybe_unused]] std::size_t m,
                          [[maybe_unused]] unsigned bits, [[maybe_unused]] BitWriter& writer) {
  std::size_t i = 0;
#if defined(__AVX2__)
  if constexpr (kHasLanes<T>) {
    if (bits <= 32 * kLaneWords)
      with_words(bits, [&]<int Words>() {
        constexpr std::size_t kTogether = kSideBySide * kLaneValues;
        for (; i + kTogether <= m; i += kTogether) encode_group<Words, kSideBySide>(x + i, bits, writer);
        for (; i + kLaneValues <= m; i += kLaneValues) encode_group<Words, 1>(x + i, bits, writer);
      });
  }
#endif
  return i;
}

template <typename T>
std::size_t decode_groups([[maybe_unused]] BitReader& reader, [[maybe_unused]] std::size_t m,
                          [[maybe_unused]] unsigned bits, [[maybe_unused]] T* out) {
  std::size_t i = 0;
#if defined(__AVX2__)
  if constexpr (kHasLanes<T>) {
    if (bits <= 32 * kLaneWords)
      with_words(bits, [&]<int Words>() {
        constexpr std::size_t kTogether = kSideBySide * kLaneValues;
        for (; i + kTogether <= m; i += kTogether) decode_group<Words, kSideBySide>(reader, bits, out + i);
        for (; i + kLaneValues <= m; i += kLaneValues) decode_group<Words, 1>(reader, bits, out + i);
      });
  }
#endif
  return i;
}

// Encode m <= kTile values to whole words.
template <typename T>
void encode_tile(const T* x, std::size_t m, unsigned bits, std::uint8_t* out) {
  BitWriter writer(out);
  std::size_t i = encode_groups(x, m, bits, writer);
  std::uint64_t words[kBlockWords];
  for (; i + 4 <= m; i += 4) {
    encode_block(x + i, bits, words);
    put_block(writer, words, bits);
  }
  if (i < m) {  // filled up as zfp does with a partial block
    const T second = m - i > 1 ? x[i + 1] : x[i];
    const T padded[4] = {x[i], second, m - i > 2 ? x[i + 2] : second, x[i]};
    encode_block(padded, bits, words);
    put_block(writer, words, bits);
  }
  writer.flush();
}

// Decode m <= kTile values; `out` has room for them alone.
template <typename T>
void decode_tile(const std::uint8_t* stream, std::size_t m, unsigned bits, T* out) {
  BitReader reader(stream);
  std::size_t i = decode_groups(reader, m, bits, out);
  std::uint64_t words[kBlockWords] = {};
  for (; i + 4 <= m; i += 4) {
    get_block(reader, words, bits);
    decode_block(words, bits, out + i);
  }
  if (i < m) {
    T values[4];
    get_block(reader, words, bits);
    decode_block(words, bits, values);
    std::memcpy(out + i, values, (m - i) * sizeof(T));
  }
}

template <DTypeCode D>
void encode_all(const std::uint8_t* src, std::size_t n, std::uint32_t bits, std::uint8_t* out) {
  alignas(64) ComputeOf<D> buffer[kTile];
  for (std::size_t at = 0; at < n; at += kTile) {
    const std::size_t m = smaller(kTile, n - at);
    encode_tile(view<D>(src + at * sizeof(StorageOf<D>), m, buffer), m, bits, out + zfp_bytes(at, bits));
  }
}

void encode(const void* src, DTypeCode dtype, std::size_t n, std::uint32_t bits, std::uint8_t* out) {
  with_dtype(dtype,
             [&]<DTypeCode D>() { encode_all<D>(static_cast<const std::uint8_t*>(src), n, bits, out); });
}

template <typename T>
void decode_all(const std::uint8_t* stream, std::size_t n, std::uint32_t bits, std::uint8_t* out,
                DTypeCode out_dtype, bool add) {
  alignas(64) T buffer[kTile];
  constexpr DTypeCode kOwn = sizeof(T) == 8 ? kFloat64 : kFloat32;
  const bool direct = !add && out_dtype == kOwn && aligned<T>(out);
  for (std::size_t at = 0; at < n; at += kTile) {
    const std::size_t m = smaller(kTile, n - at);
    const std::uint8_t* from = stream + zfp_bytes(at, bits);
    std::uint8_t* to = out + at * size_of(out_dtype);
    if (direct) {
      decode_tile(from, m, bits, reinterpret_cast<T*>(to));
      continue;
    }
    decode_tile(from, m, bits, buffer);
    if (add)
      store_add<kOwn>(buffer, to, m);
    else
      with_dtype(out_dtype, [&]<DTypeCode D>() { store<D>(buffer, to, m); });
  }
}

void decode(const std::uint8_t* stream, bool wide, std::size_t n, std::uint32_t bits, void* out,
            DTypeCode out_dtype, bool add) {
  auto* to = static_cast<std::uint8_t*>(out);
  if (wide)
    decode_all<double>(stream, n, bits, to, out_dtype, add);
  else
    decode_all<float>(stream, n, bits, to, out_dtype, add);
}

}  // namespace

extern const ZfpKernels zfp_kernels;
const ZfpKernels zfp_kernels = {encode, decode};

}  // namespace hybridcomp::HC_ISA
