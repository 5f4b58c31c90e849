#include "shadow.hpp"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

namespace hc {
namespace {

// Zeroed, and taking real memory only where it is touched.
template <typename T>
T* map(std::uint64_t count) {
  void* at = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) {
    std::perror("emulation: no memory to watch a buffer");
    std::abort();
  }
  return static_cast<T*>(at);
}

}  // namespace

Shadow::~Shadow() { release(); }

void Shadow::release() {
  if (!cells_) return;
  munmap(cells_, words_ * sizeof *cells_);
  munmap(split_, words_ * sizeof *split_);
  cells_ = nullptr;
  parts_.clear();
}

void Shadow::cover(std::uintptr_t begin, std::uint64_t bytes) {
  release();
  first_ = begin & ~std::uintptr_t{3};
  words_ = (begin + bytes - first_ + 3) / 4 + 1;
  cells_ = map<Cell>(words_);
  split_ = map<std::uint32_t>(words_);
}

std::array<Cell, 4>& Shadow::split(std::uint64_t word) {
  if (split_[word] == 0) {
    const Cell& whole = cells_[word];
    parts_.push_back({whole, whole, whole, whole});
    split_[word] = static_cast<std::uint32_t>(parts_.size());
  }
  return parts_[split_[word] - 1];
}

}  // namespace hc
