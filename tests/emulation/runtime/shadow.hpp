// Records of each byte of a piece of memory: who wrote and read it last.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace hc {

// One access. `block` counts the blocks of all launches, so that the records of earlier launches need no
// clearing.
struct Record {
  std::uint32_t block = 0;
  std::uint32_t thread : 10 = 0;
  std::uint32_t clock : 21 = 0;  // the thread's clock; 0: no access
  std::uint32_t atomic : 1 = 0;
  std::uint32_t caller = 0;  // address in the module
};

// Two writers, of which the second is another thread's concurrent atomic, and two different readers: with one
// of each, a thread's own access could hide another's.
struct Cell {
  Record writes[2];
  Record reads[2];
};

// A cell per word of four bytes; four of them, aside, for a word of which parts were accessed.
class Shadow {
 public:
  Shadow() = default;
  Shadow(const Shadow&) = delete;
  Shadow& operator=(const Shadow&) = delete;
  ~Shadow();

  void cover(std::uintptr_t begin, std::uint64_t bytes);

  // Calls visit(cell, address) for each cell of the bytes, until it returns false.
  template <typename Visit>
  void visit(std::uintptr_t begin, std::uint64_t bytes, Visit&& visit) {
    const std::uintptr_t end = begin + bytes;
    for (std::uintptr_t word = begin & ~std::uintptr_t{3}; word < end; word += 4) {
      const std::uint64_t i = (word - first_) / 4;
      if (word >= begin && word + 4 <= end && split_[i] == 0) {
        if (!visit(cells_[i], word)) return;
        continue;
      }
      std::array<Cell, 4>& parts = split(i);
      for (std::uintptr_t at = word < begin ? begin : word; at < end && at < word + 4; ++at) {
        if (!visit(parts[at - word], at)) return;
      }
    }
  }

 private:
  std::array<Cell, 4>& split(std::uint64_t word);
  void release();

  std::uintptr_t first_ = 0;  // address of the first word
  std::uint64_t words_ = 0;
  Cell* cells_ = nullptr;
  std::uint32_t* split_ = nullptr;  // 1 + index in parts_
  std::vector<std::array<Cell, 4>> parts_;
};

}  // namespace hc
