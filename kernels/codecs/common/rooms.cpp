#include "codecs/common/rooms.hpp"

#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace hybridcomp {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kHuge = std::size_t(4) << 20;   // bytes from which on huge pages are worth asking for
constexpr std::size_t kSmall = std::size_t(1) << 20;  // bytes below which the allocator is nearly as good
constexpr std::size_t kSmallKept = std::size_t(4) << 20;  // bytes of small rooms that are kept
constexpr std::size_t kSpare = 3;  // rooms of one size that are kept: two during a step, one of another key's

// Ask for huge pages, as NumPy does for its arrays. This is advice: it does not matter whether it is taken.
void ask_for_huge_pages([[maybe_unused]] void* base, [[maybe_unused]] std::size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (bytes < kHuge) return;
  constexpr std::uintptr_t kPage = 4096;
  const auto begin = (reinterpret_cast<std::uintptr_t>(base) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<std::uintptr_t>(base) + bytes) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace

Room::Room(std::size_t bytes, bool zeros) : bytes_(bytes) {
  // calloc knows which pages are zero already: pages of a large state that no step touches take no memory.
  base_ = zeros ? std::calloc(bytes + kLine, 1) : std::malloc(bytes + kLine);
  if (!base_) throw std::bad_alloc();
  ask_for_huge_pages(base_, bytes);
  data_ = static_cast<std::uint8_t*>(base_) + (kLine - reinterpret_cast<std::uintptr_t>(base_) % kLine);
}

Room::~Room() { std::free(base_); }

RoomPointer Rooms::take(std::size_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = free_.find(bytes);
    if (found != free_.end() && !found->second.empty()) {
      RoomPointer room = std::move(found->second.back());
      found->second.pop_back();
      if (bytes < kSmall) small_ -= bytes;
      return room;
    }
  }
  return std::make_shared<Room>(bytes, false);
}

void Rooms::give(RoomPointer room) noexcept {
  const std::size_t bytes = room->bytes();
  const bool small = bytes < kSmall;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (small && bytes > kSmallKept - small_) return;
  try {
    std::vector<RoomPointer>& free = free_[bytes];
    if (free.size() >= kSpare) return;
    free.push_back(std::move(room));
  } catch (const std::bad_alloc&) {
    return;
  }
  if (small) small_ += bytes;
}

}  // namespace hybridcomp
