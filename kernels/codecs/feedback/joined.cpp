#include "codecs/feedback/joined.hpp"

#include <algorithm>
#include <utility>

namespace hybridcomp {
namespace {

std::size_t size_of_all(const std::vector<std::shared_ptr<Memory>>& parts) {
  std::size_t n = 0;
  for (const auto& part : parts) n += part->size();
  return n;
}

}  // namespace

JoinedMemory::JoinedMemory(std::vector<std::shared_ptr<Memory>> parts, std::shared_ptr<Rooms> rooms)
    : Memory(size_of_all(parts), parts.front()->kind() == kFloat64, std::move(rooms)),
      parts_(std::move(parts)) {
  std::size_t start = 0;
  for (const auto& part : parts_) {
    starts_.push_back(start);
    start += part->size();
  }
}

Memory& JoinedMemory::at(std::size_t& start) const {
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), start);
  const auto index = static_cast<std::size_t>(after - starts_.begin()) - 1;
  start -= starts_[index];
  return *parts_[index];
}

bool JoinedMemory::adds_own() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->adds_own(); });
}

std::size_t JoinedMemory::encode(const Kernels& k, const Encoder& encoder, const std::uint8_t* x,
                                 DTypeCode dtype, std::size_t n, std::size_t start, int threads,
                                 std::uint8_t* out) {
  Memory& part = at(start);
  return part.encode(k, encoder, x, dtype, n, start, threads, out);
}

void JoinedMemory::correct(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t n,
                           std::size_t start, int threads, std::uint8_t* out) {
  Memory& part = at(start);
  part.correct(k, x, dtype, n, start, threads, out);
}

void JoinedMemory::keep(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n,
                        std::size_t start, double weight, int threads) {
  Memory& part = at(start);
  part.keep(k, corrected, decoded, n, start, weight, threads);
}

bool JoinedMemory::own(const Kernels& k, const Encoder& encoder, const std::uint8_t* x, DTypeCode dtype,
                       std::size_t n, std::size_t start, int threads, std::uint8_t* sums) {
  Memory& part = at(start);
  return part.own(k, encoder, x, dtype, n, start, threads, sums);
}

std::size_t JoinedMemory::encode_sum(const Kernels& k, const Encoder& encoder, std::uint8_t* total,
                                     std::size_t n, std::size_t start, int ranks, int threads,
                                     std::uint8_t* out) {
  Memory& part = at(start);
  return part.encode_sum(k, encoder, total, n, start, ranks, threads, out);
}

void JoinedMemory::correct_sum(const Kernels& k, std::uint8_t* total, std::size_t n, std::size_t start,
                               int ranks, int threads) {
  Memory& part = at(start);
  part.correct_sum(k, total, n, start, ranks, threads);
}

void JoinedMemory::keep_sum(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n,
                            std::size_t start, int ranks, int threads) {
  Memory& part = at(start);
  part.keep_sum(k, corrected, decoded, n, start, ranks, threads);
}

bool JoinedMemory::owned(std::size_t n, std::size_t start) const {
  const Memory& part = at(start);
  return part.owned(n, start);
}

void JoinedMemory::result(const Kernels& k, std::uint8_t* values, std::size_t n, std::size_t start,
                          int threads) {
  Memory& part = at(start);
  part.result(k, values, n, start, threads);
}

RoomPointer JoinedMemory::state(std::string_view, bool) { return nullptr; }

}  // namespace hybridcomp
