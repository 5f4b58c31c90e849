// The forms of error feedback; hybridcomp/codecs/feedback/memories.py and estimates.py say what they are.
#pragma once

#include <vector>

#include "codecs/feedback/feedback.hpp"
#include "codecs/feedback/memory.hpp"

namespace hybridcomp {

// `ef`. State: what has not been sent yet.
class PlainMemory : public Memory {
 public:
  PlainMemory(std::size_t n, bool wide, std::shared_ptr<Rooms> rooms);

  std::size_t encode(const Kernels& k, const Encoder& encoder, const std::uint8_t* x, DTypeCode dtype,
                     std::size_t n, std::size_t start, int threads, std::uint8_t* out) override;
  void correct(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t n, std::size_t start,
               int threads, std::uint8_t* out) override;
  void keep(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n, std::size_t start,
            double weight, int threads) override;
  std::size_t encode_sum(const Kernels& k, const Encoder& encoder, std::uint8_t* total, std::size_t n,
                         std::size_t start, int ranks, int threads, std::uint8_t* out) override;
  RoomPointer state(std::string_view name, bool make) override;

 protected:
  // Encode x, over `ranks` for a mean, in one pass over memory; 0 where there is no kernel for it. `kept`
  // tells whether the error is that of this message: all is finite.
  std::size_t encode_fused(const Kernels& k, const Encoder& encoder, const std::uint8_t* x, DTypeCode dtype,
                           std::size_t n, std::size_t start, int ranks, int threads, std::uint8_t* out,
                           bool* kept);

  // keep(); returns whether all is finite.
  bool keep_finite(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n,
                   std::size_t start, double weight, int threads);

 private:
  RoomPointer error_;
};

// `ef-sgdm`. State: what has not been sent yet, and "velocity", of this rank's own data alone.
class AcceleratedMemory final : public PlainMemory {
 public:
  AcceleratedMemory(std::size_t n, bool wide, std::shared_ptr<Rooms> rooms, double momentum);

  bool adds_own() const override { return false; }
  std::size_t encode(const Kernels& k, const Encoder& encoder, const std::uint8_t* x, DTypeCode dtype,
                     std::size_t n, std::size_t start, int threads, std::uint8_t* out) override;
  void correct(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t n, std::size_t start,
               int threads, std::uint8_t* out) override;
  void keep(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n, std::size_t start,
            double weight, int threads) override;
  bool corrected(std::size_t n) const override { return moved_ && n == moving_; }
  bool own(const Kernels& k, const Encoder& encoder, const std::uint8_t* x, DTypeCode dtype, std::size_t n,
           std::size_t start, int threads, std::uint8_t* sums) override;
  void correct_sum(const Kernels& k, std::uint8_t* total, std::size_t n, std::size_t start, int ranks,
                   int threads) override;
  void keep_sum(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n,
                std::size_t start, int ranks, int threads) override;
  RoomPointer state(std::string_view name, bool make) override;

 private:
  // Write x with momentum to `out`, and what the velocity will be to `moved`; returns whether all is finite.
  bool accelerate(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t n, std::size_t start,
                  int threads, std::uint8_t* moved, std::uint8_t* out) const;

  const double momentum_;
  RoomPointer velocity_;
  Lease moved_;             // between correct and keep: what the velocity will be
  std::size_t moving_ = 0;  // elements of it
};

// `loco`. State: bytes, an int8 message of blocks of kStateBlock, but for its header, which is not written.
class AverageMemory final : public Memory {
 public:
  AverageMemory(std::size_t n, bool wide, std::shared_ptr<Rooms> rooms, double beta,
                std::uint64_t reset_steps);

  std::uint64_t begin() override;
  std::size_t encode(const Kernels& k, const Encoder& encoder, const std::uint8_t* x, DTypeCode dtype,
                     std::size_t n, std::size_t start, int threads, std::uint8_t* out) override;
  void correct(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t n, std::size_t start,
               int threads, std::uint8_t* out) override;
  void keep(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n, std::size_t start,
            double weight, int threads) override;
  RoomPointer state(std::string_view name, bool make) override;
  std::size_t state_size() const override { return 1; }

 private:
  State8 sections() const;
  Lease fresh(std::size_t n, std::size_t start) const;  // for a span's part of the state

  const double beta_;
  const std::uint64_t reset_steps_;
  RoomPointer message_;
};

// `dgc`. State: the sum of what has not been sent yet, and "velocity".
class MomentumMemory final : public Memory {
 public:
  MomentumMemory(std::size_t n, bool wide, std::shared_ptr<Rooms> rooms, double momentum);

  bool adds_own() const override { return false; }
  bool sends_own() const override { return true; }
  void correct(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t n, std::size_t start,
               int threads, std::uint8_t* out) override;
  void keep(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n, std::size_t start,
            double weight, int threads) override;
  bool corrected(std::size_t n) const override { return moved_ && n == moving_; }
  bool own(const Kernels& k, const Encoder& encoder, const std::uint8_t* x, DTypeCode dtype, std::size_t n,
           std::size_t start, int threads, std::uint8_t* sums) override;
  void correct_sum(const Kernels& k, std::uint8_t* total, std::size_t n, std::size_t start, int ranks,
                   int threads) override;
  void keep_sum(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n,
                std::size_t start, int ranks, int threads) override;
  RoomPointer state(std::string_view name, bool make) override;

 private:
  const double momentum_;
  RoomPointer sum_, velocity_;
  Lease moved_;             // between correct and keep: what the velocity will be
  std::size_t moving_ = 0;  // elements of it
};

// `ef21`. State: the estimate that this rank has sent; "total", the sum of all ranks' estimates, or of the
// other ranks' in the spans that this rank owns; "known", the estimate of a reduction's result. The latter
// two are made when they are needed.
//
// What becomes of them waits until it is known that all could use a message: until the result of its span is
// there and finite, or the next step begins.
class EstimateMemory final : public Memory {
 public:
  EstimateMemory(std::size_t n, bool wide, std::shared_ptr<Rooms> rooms);

  bool tracks() const override { return true; }
  bool adds_own() const override { return false; }
  std::uint64_t begin() override;
  void correct(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t n, std::size_t start,
               int threads, std::uint8_t* out) override;
  void keep(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n, std::size_t start,
            double weight, int threads) override;
  bool own(const Kernels& k, const Encoder& encoder, const std::uint8_t* x, DTypeCode dtype, std::size_t n,
           std::size_t start, int threads, std::uint8_t* sums) override;
  void correct_sum(const Kernels& k, std::uint8_t* total, std::size_t n, std::size_t start, int ranks,
                   int threads) override;
  void keep_sum(const Kernels&, const std::uint8_t*, Lease&, std::size_t, std::size_t, int, int) override {}
  bool owned(std::size_t n, std::size_t start) const override;
  void result(const Kernels& k, std::uint8_t* values, std::size_t n, std::size_t start, int threads) override;
  RoomPointer state(std::string_view name, bool make) override;

  // Write the sum of all ranks' decoded messages, of all elements, and of their estimates until now to `out`,
  // and keep it; if it is not finite, keep nothing, and take back what was sent last.
  void add(const Kernels& k, const std::uint8_t* decoded, int threads, std::uint8_t* out);

  // What was sent in this step has arrived everywhere, or, if not `good`, is used nowhere.
  void settle(bool good);

 private:
  struct Span {
    std::size_t start, n;
    friend bool operator==(const Span&, const Span&) = default;
  };

  // What an array of the state becomes in some spans.
  struct Pending {
    std::vector<Span> spans;
    Lease values;  // of all elements; taken while there are spans

    void put(Span span);   // once
    bool take(Span span);  // whether it was there
    bool meets(Span span) const;
  };

  struct Part {
    Span span;
    const std::uint8_t* x;
    DTypeCode dtype;
  };

  std::uint8_t* place(Pending& pending, Span span);  // of a span's values
  void end(Pending& pending, RoomPointer& state, Span span, bool good);
  void settle(Span span, bool good);
  RoomPointer& made(RoomPointer& state) const;

  RoomPointer sent_, total_, known_;
  Pending waiting_;         // what will be sent_
  Pending summed_;          // what will be total_, of owned spans
  std::vector<Part> owns_;  // this rank's own parts of spans between own and encode_sum
};

}  // namespace hybridcomp
