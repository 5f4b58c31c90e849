#include "engine/shared_memory.hpp"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cstdlib>
#include <new>

#include "engine/waiting/clock.hpp"

namespace hybridcomp::engine {
namespace {

constexpr std::size_t kLeast = 4096;                        // least bytes of a block
constexpr std::size_t kMostLeased = std::size_t(64) << 20;  // bytes that late readers may leave behind

std::size_t size_class(std::size_t bytes) { return std::bit_ceil(bytes < kLeast ? kLeast : bytes); }

// Give the whole pages of an arena's block back to the system: they read as zeros from then on.
void drop_pages(std::uint8_t* block, std::size_t size) {
  static const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t start = (reinterpret_cast<std::uintptr_t>(block) + page - 1) / page * page;
  const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(block) + size) / page * page;
  // Where the system cannot do it, the pages stay.
  if (start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_REMOVE);
}

}  // namespace

void Bell::ring() {
  if (!sleepers.load()) return;
  rung.fetch_add(1);
  syscall(SYS_futex, &rung, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Sleeper::sleep(double seconds) {
  sleep_precisely();
  const timespec time = time_of(seconds);
  syscall(SYS_futex, &bell_.rung, FUTEX_WAIT, seen_, &time, nullptr, 0);
}

void Blocks::use(const Arena& arena, std::size_t first) {
  // Other processes could not read blocks of the heap.
  for (auto& [size, free] : free_)
    for (std::uint8_t* const block : free.blocks) release(block);
  free_.clear();
  arena_ = arena;
  used_ = first;
}

void Blocks::release(std::uint8_t* block) {
  sizes_.erase(block);
  std::free(block - kLine);
}

std::uint8_t* Blocks::take(std::size_t bytes) {
  const std::size_t size = size_class(bytes);
  Free& free = free_[size];
  if (free.blocks.empty() && !leased_.empty()) collect();
  if (!free.blocks.empty()) {
    std::uint8_t* const block = free.blocks.back();
    free.blocks.pop_back();
    free.least = std::min(free.least, free.blocks.size());
    free.bare = std::min(free.bare, free.blocks.size());
    // No rank reads a free block. But Open MPI writes past receive buffers that are too short: the block's
    // next user would wait for ever for readers that such a write has made up.
    if (shared(block)) lease_of(block).store(0, std::memory_order_relaxed);
    return block;
  }
  std::uint8_t* block = nullptr;
  if (arena_.base) {
    if (used_ + kLine + size > arena_.bytes) throw std::bad_alloc();  // others could not read the heap
    block = arena_.base + used_ + kLine;
    used_ += kLine + size;
  } else {
    void* const memory = std::aligned_alloc(kLine, size + kLine);
    if (!memory) throw std::bad_alloc();
    block = static_cast<std::uint8_t*>(memory) + kLine;
    new (block - kLine) std::atomic<std::uint32_t>(0);
  }
  sizes_[block] = size;
  return block;
}

void Blocks::give(std::uint8_t* block) {
  put(block);
  if (++given_ >= period) trim();
}

void Blocks::put(std::uint8_t* block) {
  if (arena_.base && !shared(block)) return release(block);  // taken before there was an arena
  const std::size_t size = sizes_[block];
  if (shared(block) && lease_of(block).load(std::memory_order_acquire)) {
    leased_.push_back(block);
    leased_bytes_ += size;
  } else {
    free_[size].blocks.push_back(block);
  }
}

void Blocks::trim() {
  given_ = 0;
  collect();  // or blocks whose readers were late would keep their pages while others serve
  for (auto& [size, free] : free_) {
    if (arena_.base)
      for (; free.bare < free.least; ++free.bare) drop_pages(free.blocks[free.bare], size);
    free.least = free.blocks.size();
  }
}

bool Blocks::crowded() {
  if (leased_bytes_ > kMostLeased) collect();
  return leased_bytes_ > kMostLeased;
}

void Blocks::collect() {
  for (std::size_t i = leased_.size(); i-- > 0;) {
    std::uint8_t* const block = leased_.front();
    leased_.pop_front();
    leased_bytes_ -= sizes_[block];
    put(block);
  }
}

}  // namespace hybridcomp::engine
