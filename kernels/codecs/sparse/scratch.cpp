#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "codecs/sparse/select.hpp"

namespace hybridcomp {
namespace {

constexpr std::size_t kKept = std::size_t(128) << 20;  // bytes that the process keeps for the next call

struct Spare {
  std::uint8_t* data;
  std::size_t bytes;
};

struct Spares {
  std::mutex mutex;
  std::vector<Spare> all;  // ascending by size
  std::size_t bytes = 0;
};

Spares& spares() {
  static Spares& s = *new Spares;  // never destroyed: threads may outlive the module's statics
  return s;
}

Spare take_largest() {
  Spares& s = spares();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (s.all.empty()) return {nullptr, 0};
  const Spare spare = s.all.back();
  s.all.pop_back();
  s.bytes -= spare.bytes;
  return spare;
}

bool keep(Spare spare) {
  Spares& s = spares();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (spare.bytes > kKept - s.bytes) return false;
  try {
    s.all.insert(std::upper_bound(s.all.begin(), s.all.end(), spare,
                                  [](const Spare& a, const Spare& b) { return a.bytes < b.bytes; }),
                 spare);
  } catch (const std::bad_alloc&) {
    return false;
  }
  s.bytes += spare.bytes;
  return true;
}

}  // namespace

Scratch::~Scratch() {
  if (data_ && !keep({data_, bytes_})) std::free(data_);
}

Scratch::Scratch(Scratch&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Scratch& Scratch::operator=(Scratch&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

std::uint8_t* Scratch::reserve(std::size_t bytes) {
  if (!data_ && bytes) {
    const Spare spare = take_largest();
    data_ = spare.data;
    bytes_ = spare.bytes;
  }
  if (bytes > bytes_) {
    const std::size_t grown = std::max(bytes, bytes_ + bytes_ / 2);
    void* const moved = std::realloc(data_, grown);
    if (!moved) throw std::bad_alloc();
    data_ = static_cast<std::uint8_t*>(moved);
    bytes_ = grown;
  }
  return data_;
}

}  // namespace hybridcomp
