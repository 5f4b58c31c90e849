// Elements that a sparse codec sends: collected in one pass over the tensor, narrowed if there are more than
// wanted, and written out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codecs/common/kernels.hpp"
#include "codecs/common/parallel.hpp"
#include "codecs/sparse/sparse.hpp"
#include "hybridcomp/sparse.hpp"

namespace hybridcomp {

// Memory that grows. It is reused from earlier Scratches, of which the process keeps some: fresh pages cost
// several times as much as the work done in them here.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch();
  Scratch(Scratch&& other) noexcept;
  Scratch& operator=(Scratch&& other) noexcept;

  std::uint8_t* reserve(std::size_t bytes);  // keeps the content; throws std::bad_alloc
  std::uint8_t* data() const { return data_; }

 private:
  std::uint8_t* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Selected elements of a tensor: by blocks of kIndexBlock, indices and values, ascending.
class Selected {
 public:
  Selected(DTypeCode dtype, std::size_t n) : dtype_(dtype), n_(n) {}
  Selected(Selected&&) = default;
  Selected& operator=(Selected&&) = default;

  std::size_t count() const;        // number of elements selected
  std::size_t index_bytes() const;  // bytes of the index section
  DTypeCode dtype() const { return dtype_; }
  std::size_t elements() const { return n_; }  // elements of the tensor

  // Take the elements with key >= `limit`, and of those with key == `tie` the first. Gives up, returning
  // false, once there are more than `most`. May be called once.
  bool collect(const Kernels& kernels, const std::uint8_t* src, Selection selection, std::size_t most,
               int threads);

  // Return how many of the elements taken have key >= `limit`.
  std::size_t reaching(const Kernels& kernels, std::uint64_t limit) const;

  // Keep those of the elements taken that the selection names.
  void narrow(const Kernels& kernels, Selection selection);

  // Return the selection of the k largest of the elements taken (1 .. count). `high` is a guess: fewer than k
  // elements reach it, hopefully nearly k.
  Selection largest(const Kernels& kernels, std::size_t k, std::uint64_t high) const;

  // Write the index section: index_bytes().
  void write_indices(std::uint8_t* indices) const;

  // Return the values, count() of them, one after another; after this their other functions must not be
  // called.
  std::uint8_t* values();

  // Copy the values to `out`.
  void copy_values(std::uint8_t* out) const;

 private:
  struct Range {  // elements that one thread collected
    Scratch indices, values;
  };
  struct Block {
    std::uint32_t count = 0;
    int range = 0;
    std::size_t at = 0;  // its first element in the range's scratch
  };

  std::uint16_t* indices_of(const Block& block) const;
  std::uint8_t* values_of(const Block& block) const;

  DTypeCode dtype_;
  std::size_t n_;
  std::vector<Range> ranges_;
  std::vector<Block> blocks_;
  bool joined_ = false;  // whether the values lie one after another in the first range
};

// Select the k <= n elements of largest key, ties to the lower index. With `zeros` false no zero is taken.
Selected select_largest(const Kernels& kernels, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                        std::size_t k, bool zeros, int threads);

// Select the elements of magnitude at least `limit`, or with `relative` so many times the root mean square of
// the finite ones, and NaN.
Selected select_threshold(const Kernels& kernels, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                          double limit, bool relative, int threads);

// SIDCo: about k of n elements (never more than sidco_most), by a limit that `stages` fits give (0: as many
// as it takes).
struct SidcoFit {
  int stages;
  Distribution distribution;
};
Selected select_sidco(const Kernels& kernels, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                      std::size_t k, SidcoFit fits, int threads);

// Return the limit of that many stages, at least one; infinity where more than k elements are not finite.
double sidco_limit(const Kernels& kernels, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                   std::size_t k, SidcoFit fits);
constexpr std::size_t sidco_most(std::size_t n, std::size_t k) { return k + k / 4 < n ? k + k / 4 : n; }

}  // namespace hybridcomp
