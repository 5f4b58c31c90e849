#include "codecs/feedback/memory.hpp"

#include <cstring>
#include <utility>

#include "codecs/convert/convert.hpp"
#include "codecs/feedback/passes.hpp"
#include "codecs/messages/table.hpp"

namespace hybridcomp {

Memory::Memory(std::size_t n, bool wide, std::shared_ptr<Rooms> rooms)
    : n_(n), wide_(wide), rooms_(std::move(rooms)) {}

std::size_t Memory::encode(const Kernels& k, const Encoder& encoder, const std::uint8_t* x, DTypeCode dtype,
                           std::size_t n, std::size_t start, int threads, std::uint8_t* out) {
  const Lease corrected = lease(n);
  correct(k, x, dtype, n, start, threads, corrected.data());
  const std::size_t bytes = encoder.write(k, corrected.data(), kind(), n, threads, out);
  Lease decoded = lease(n);
  if (!decode(k, encoder, out, bytes, n, threads, decoded.data())) return 0;
  keep(k, corrected.data(), decoded, n, start, 1, threads);
  return bytes;
}

bool Memory::own(const Kernels& k, const Encoder&, const std::uint8_t* x, DTypeCode dtype, std::size_t n,
                 std::size_t, int threads, std::uint8_t* sums) {
  convert_all(k, x, dtype, n, threads, sums, kind(), false);
  return true;
}

std::size_t Memory::encode_sum(const Kernels& k, const Encoder& encoder, std::uint8_t* total, std::size_t n,
                               std::size_t start, int ranks, int threads, std::uint8_t* out) {
  correct_sum(k, total, n, start, ranks, threads);
  const std::size_t bytes = encoder.write(k, total, kind(), n, threads, out);
  if (tracks()) return bytes;
  Lease decoded = lease(n);
  if (!decode(k, encoder, out, bytes, n, threads, decoded.data())) return 0;
  keep_sum(k, total, decoded, n, start, ranks, threads);
  return bytes;
}

void Memory::correct_sum(const Kernels& k, std::uint8_t* total, std::size_t n, std::size_t start, int ranks,
                         int threads) {
  correct(k, total, kind(), n, start, threads, total);
  divide_pass(k, total, wide_, n, ranks, threads);
}

void Memory::keep_sum(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n,
                      std::size_t start, int ranks, int threads) {
  keep(k, corrected, decoded, n, start, ranks, threads);
}

void Memory::replace(RoomPointer& state, Lease& fresh, std::size_t n, std::size_t start) const {
  if (n == n_ && fresh.exchange(state)) return;
  if (n) std::memcpy(at(state, start), fresh.data(), n * size_of(kind()));
}

bool Memory::decode(const Kernels& k, const Encoder& encoder, const std::uint8_t* message, std::size_t bytes,
                    std::size_t n, int threads, std::uint8_t* out) const {
  return decode_payload(k, encoder.identity.id.codec, message + sizeof(Header), bytes - sizeof(Header),
                        kind(), n, threads, out, kind(), false) == kOk;
}

}  // namespace hybridcomp
