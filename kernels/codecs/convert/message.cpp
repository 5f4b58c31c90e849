// Messages of elements as they are, or as another type.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "codecs/convert/convert.hpp"
#include "codecs/messages/codec_entry.hpp"
#include "codecs/messages/fixed.hpp"
#include "codecs/messages/sums.hpp"

namespace hybridcomp {

void convert_all(const Kernels& k, const std::uint8_t* src, DTypeCode src_dtype, std::size_t n, int threads,
                 std::uint8_t* dst, DTypeCode dst_dtype, bool add) {
  split(n, kGroup, ranges_of(n, kGroup, threads), [&](int, std::size_t begin, std::size_t end) {
    k.convert->convert(src + begin * size_of(src_dtype), src_dtype, dst + begin * size_of(dst_dtype),
                       dst_dtype, end - begin, add);
  });
}

namespace {

constexpr std::size_t kShort = 1024;   // elements of an array whose halfs are all looked at
constexpr std::size_t kOfEach = 1024;  // of a longer one: kLooked of so many

std::atomic<void (*)()> overflow_listener{nullptr};

bool finite(const std::uint8_t* element, DTypeCode dtype) {
  if (dtype == kFloat64) {
    double x;
    std::memcpy(&x, element, sizeof(x));
    return magnitude(x) < Real<double>::kInfinity;
  }
  float x;
  if (dtype == kFloat32) {
    std::memcpy(&x, element, sizeof(x));
  } else {
    std::uint16_t bits;
    std::memcpy(&bits, element, sizeof(bits));
    x = float_of(bfloat_to_float_bits(bits));
  }
  return magnitude(x) < Real<float>::kInfinity;
}

// Tell of values that an array of `whole` elements has lost: m of them, which were encoded to `halfs`.
void look_for_overflow(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, const std::uint8_t* halfs,
                       std::size_t m, std::size_t whole) {
  if (!overflow_listener.load(std::memory_order_relaxed)) return;
  if (!k.convert->infinite(halfs, m, whole <= kShort ? kLooked : kOfEach)) return;
  for (std::size_t i = 0; i < m; ++i) {
    std::uint16_t half;
    std::memcpy(&half, halfs + 2 * i, sizeof(half));
    if ((half & 0x7FFF) != 0x7C00 || !finite(src + i * size_of(dtype), dtype)) continue;
    if (auto* const tell = overflow_listener.exchange(nullptr)) tell();
    return;
  }
}

// Return the type that elements are stored in. Stored 0: their own.
template <int Stored>
constexpr DTypeCode stored_as(DTypeCode dtype) {
  return Stored ? static_cast<DTypeCode>(Stored) : dtype;
}

std::size_t write(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, DTypeCode to,
                  CodecId id, int threads, std::uint8_t* out) {
  const std::size_t size = element_bytes(dtype), stored = element_bytes(to);
  return write_fixed(
      k, {id, dtype, nullptr, 0}, n, kGroup, threads, out, [](std::size_t) { return std::size_t(0); },
      [&](std::size_t e) { return e * stored; },
      [&](std::size_t at, std::size_t m, std::uint8_t*, std::uint8_t* values) {
        if (is_float(dtype))
          k.convert->convert(src + at * size, dtype, values, to, m, false);
        else
          std::memcpy(values, src + at * size, m * size);
        if (to == kFloat16 && dtype != to) look_for_overflow(k, src + at * size, dtype, values, m, n);
      });
}

// Encode a sum of messages, tile by tile; returns the bytes, or 0 if its messages cannot be read in tiles.
std::size_t write_cast_sum(const Kernels& k, const Sum& sum, DTypeCode to, CodecId id, int threads,
                           std::uint8_t* out) {
  if (!sum.fits(1)) return 0;
  return write_fixed(
      k, {id, sum.dtype, nullptr, 0}, sum.n, kPartTile, threads, out,
      [](std::size_t) { return std::size_t(0); }, [&](std::size_t e) { return e * size_of(to); },
      [&](std::size_t begin, std::size_t count, std::uint8_t*, std::uint8_t* values) {
        Sum::Buffer buffer;
        for (std::size_t at = begin; at < begin + count; at += kPartTile) {
          const std::size_t m = std::min(kPartTile, begin + count - at);
          std::uint8_t* const stored = values + (at - begin) * size_of(to);
          const std::uint8_t* const sums = sum.tile(k, at, m, &buffer);
          k.convert->convert(sums, sum.dtype, stored, to, m, false);
          if (to == kFloat16 && sum.dtype != to) look_for_overflow(k, sums, sum.dtype, stored, m, sum.n);
          sum.put(k, at, m, &buffer, [&](std::uint8_t* out) {
            k.convert->convert(stored, to, out, sum.result_dtype, m, false);
          });
        }
        if (sum.stream) streamed();
      });
}

template <int Stored>
Encoder make(CodecId id, const Parameters&) {
  return {
      {id},
      [](std::size_t n, DTypeCode dtype) {
        return sizeof(Header) + n * element_bytes(stored_as<Stored>(dtype));
      },
      [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
          std::uint8_t* out) { return write(k, src, dtype, n, stored_as<Stored>(dtype), id, threads, out); },
      [=](const Kernels& k, const Sum& sum, int threads, std::uint8_t* out) {
        return write_cast_sum(k, sum, stored_as<Stored>(sum.dtype), id, threads, out);
      }};
}

template <int Stored>
int check(const std::uint8_t*, std::size_t bytes, DTypeCode dtype, std::size_t n) {
  const std::size_t size = element_bytes(stored_as<Stored>(dtype));
  return bytes % size == 0 && bytes / size == n ? kOk : kBadLength;
}

template <int Stored>
int decode(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n,
           int threads, std::uint8_t* out, DTypeCode out_dtype, bool add) {
  const int status = check<Stored>(payload, bytes, dtype, n);
  if (status != kOk) return status;
  if (is_float(dtype))
    convert_all(k, payload, stored_as<Stored>(dtype), n, threads, out, out_dtype, add);
  else if (n)
    std::memcpy(out, payload, bytes);
  return kOk;
}

template <int Stored>
bool open(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n, Parts* parts) {
  *parts = {dtype, 1, payload, stored_as<Stored>(dtype), nullptr, {}};
  return check<Stored>(payload, bytes, dtype, n) == kOk;
}

template <int Stored>
constexpr CodecEntry entry(std::uint8_t id) {
  return {.id = id,
          .exact = Stored == 0,
          .encoder = make<Stored>,
          .check_head = check<Stored>,
          .decode = decode<Stored>,
          .open = open<Stored>};
}

}  // namespace

void tell_of_overflow(void (*tell)()) { overflow_listener = tell; }

extern const CodecEntry kNoneCodec = entry<0>(kNoneId), kFp16Codec = entry<kFloat16>(1),
                        kBf16Codec = entry<kBFloat16>(2);

}  // namespace hybridcomp
