// Several calls of one kernel in one launch: each block looks up in a table which call it works for. A row of
// the table has the number of blocks up to and with its own, its own number, and the arguments, 8 bytes each.
// Rows must not depend on each other.
#pragma once

#include "common/common.cuh"

namespace hybridcomp {

template <int... I>
struct Indices {};
template <int N, int... I>
struct CountedTo : CountedTo<N - 1, N - 1, I...> {};
template <int... I>
struct CountedTo<0, I...> {
  using Type = Indices<I...>;
};

template <typename T>
struct Argument {
  HC_METHOD static T of(uint64_t word) { return static_cast<T>(word); }
};
template <typename T>
struct Argument<T*> {
  HC_METHOD static T* of(uint64_t word) { return reinterpret_cast<T*>(word); }
};

template <auto Function>
struct Table;
template <typename... Args, void (*Function)(Grid, Args...)>
struct Table<Function> {
  static constexpr uint32_t kWords = 2 + static_cast<uint32_t>(sizeof...(Args));

  template <int... I>
  HC_METHOD static void call(const uint64_t* row, Grid grid, Indices<I...>) {
    Function(grid, Argument<Args>::of(row[2 + I])...);
  }
  HC_METHOD static void run(const uint64_t* table, uint32_t rows) {
    uint32_t low = 0;  // the first row that ends behind this block
    for (uint32_t high = rows - 1; low < high;) {
      const uint32_t middle = (low + high) / 2;
      if (table[middle * kWords] > blockIdx.x)
        high = middle;
      else
        low = middle + 1;
    }
    const uint64_t* const row = table + low * kWords;
    const uint32_t end = static_cast<uint32_t>(row[0]), blocks = static_cast<uint32_t>(row[1]);
    call(row, Grid{blockIdx.x - (end - blocks), blocks}, typename CountedTo<sizeof...(Args)>::Type{});
  }
};

}  // namespace hybridcomp

// The form with a table of a kernel whose work `...` does, a function of a Grid and the kernel's arguments.
#define HC_TABLE_FORM(threads, name, ...)                                           \
  HC_KERNEL(threads) name##_table(const std::uint64_t* table, std::uint32_t rows) { \
    hybridcomp::Table<&__VA_ARGS__>::run(table, rows);                              \
  }
