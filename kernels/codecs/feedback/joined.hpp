// Memories of one form joined to one memory, for an operation on several arrays at once: their elements
// follow one another. No span has elements of two of them. The caller begins each memory's own steps.
#pragma once

#include <vector>

#include "codecs/feedback/memory.hpp"

namespace hybridcomp {

class JoinedMemory final : public Memory {
 public:
  // `parts` is at least one memory; all have one form and one type of elements.
  explicit JoinedMemory(std::vector<std::shared_ptr<Memory>> parts, std::shared_ptr<Rooms> rooms);

  bool tracks() const override { return parts_.front()->tracks(); }
  bool adds_own() const override;
  bool sends_own() const override { return parts_.front()->sends_own(); }

  std::size_t encode(const Kernels& k, const Encoder& encoder, const std::uint8_t* x, DTypeCode dtype,
                     std::size_t n, std::size_t start, int threads, std::uint8_t* out) override;
  void correct(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t n, std::size_t start,
               int threads, std::uint8_t* out) override;
  void keep(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n, std::size_t start,
            double weight, int threads) override;
  bool own(const Kernels& k, const Encoder& encoder, const std::uint8_t* x, DTypeCode dtype, std::size_t n,
           std::size_t start, int threads, std::uint8_t* sums) override;
  std::size_t encode_sum(const Kernels& k, const Encoder& encoder, std::uint8_t* total, std::size_t n,
                         std::size_t start, int ranks, int threads, std::uint8_t* out) override;
  void correct_sum(const Kernels& k, std::uint8_t* total, std::size_t n, std::size_t start, int ranks,
                   int threads) override;
  void keep_sum(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n,
                std::size_t start, int ranks, int threads) override;
  bool owned(std::size_t n, std::size_t start) const override;
  void result(const Kernels& k, std::uint8_t* values, std::size_t n, std::size_t start, int threads) override;
  RoomPointer state(std::string_view name, bool make) override;

 private:
  // Return the memory of the span that begins at `start`, and make `start` count within that memory.
  Memory& at(std::size_t& start) const;

  std::vector<std::shared_ptr<Memory>> parts_;
  std::vector<std::size_t> starts_;
};

}  // namespace hybridcomp
