// The forms of error feedback; hybridcomp/codecs/feedback/memories.py and estimates.py define them.
#pragma once

#include <vector>

#include "codecs/feedback/feedback.hpp"
#include "codecs/feedback/memory.hpp"

namespace hybridcomp {

// Form `ef`. State: the residual, which has not been sent yet.
class PlainMemory : public Memory {
 public:
  PlainMemory(std::size_t n, bool wide, std::shared_ptr<Rooms> rooms);

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
  RoomPointer state(std::string_view name, bool make) override;
  bool adds_own() const override { return !momentum_; }

  // Take x for a part of a momentum from now on: what is sent is beta * momentum + (1 - beta) * x, element by
  // element. `momentum` has all n elements, aligned and of kind(), and stays; null ends it.
  void blend(const std::uint8_t* momentum, double beta);

 protected:
  // Encode x, over `ranks` for a mean, in one pass over memory; returns 0 where there is no kernel for it.
  // `kept` tells whether the residual is now that of this message: all of it is finite.
  std::size_t encode_fused(const Kernels& k, const Encoder& encoder, const Source& x, std::size_t n,
                           std::size_t start, int ranks, int threads, std::uint8_t* out, bool* kept);

  // Return what is sent for x at an element.
  Source source(const std::uint8_t* x, DTypeCode dtype, std::size_t start) const;

  // Do keep(); returns whether all is finite.
  bool keep_finite(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n,
                   std::size_t start, double weight, int threads);

 private:
  RoomPointer error_;
  const std::uint8_t* momentum_ = nullptr;
  double beta_ = 0;
};

// Form `ef-sgdm`. State: the residual, and "velocity", of this rank's own data alone.
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
  void keep_sum(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n,
                std::size_t start, int ranks, int threads) override;
  RoomPointer state(std::string_view name, bool make) override;

 private:
  // Write x with momentum to `out`, and the new velocity to `moved`; returns whether all is finite.
  bool accelerate(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t n, std::size_t start,
                  int threads, std::uint8_t* moved, std::uint8_t* out) const;

  const double momentum_;
  RoomPointer velocity_;
  Lease moved_;             // between correct and keep: the new velocity
  std::size_t moving_ = 0;  // elements of moved_
};

// Form `loco`. State: bytes, an int8 message of blocks of kStateBlock without its header.
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
  Lease fresh(std::size_t n, std::size_t start) const;  // memory for a span's new state

  const double beta_;
  const std::uint64_t reset_steps_;
  RoomPointer message_;
};

// Form `dgc`. State: the sum that has not been sent yet, and "velocity".
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
  Lease moved_;             // between correct and keep: the new velocity
  std::size_t moving_ = 0;  // elements of moved_
};

// Form `ef21`. State: the estimate that this rank has sent; "total", the sum of all ranks' estimates, or of
// the other ranks' in the spans that this rank owns; "known", the estimate of a reduction's result. The
// latter two are made when they are needed.
//
// New values of them wait until it is known that all ranks could use a message: until the result of its span
// is there and finite, or the next step begins.
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
  // and keep it; if it is not finite, keep nothing, and take back the last change of the estimate.
  void add(const Kernels& k, const std::uint8_t* decoded, int threads, std::uint8_t* out);

  // Keep the new values of this step, since its messages arrived everywhere; or, if not `good`, drop them,
  // since no rank uses the messages.
  void settle(bool good);

 private:
  struct Span {
    std::size_t start, n;
    friend bool operator==(const Span&, const Span&) = default;
  };

  // New values of an array of the state in some spans, which wait.
  struct Pending {
    std::vector<Span> spans;
    Lease values;  // room for all elements; taken while there are spans

    void put(Span span);   // a span put twice counts once
    bool take(Span span);  // remove it; returns whether it was there
    bool meets(Span span) const;
  };

  struct Part {
    Span span;
    const std::uint8_t* x;
    DTypeCode dtype;
  };

  std::uint8_t* place(Pending& pending, Span span);  // place of a span's values
  void end(Pending& pending, RoomPointer& state, Span span, bool good);
  void settle(Span span, bool good);
  RoomPointer& made(RoomPointer& state) const;

  RoomPointer sent_, total_, known_;
  Pending waiting_;         // new values of sent_
  Pending summed_;          // new values of total_, of owned spans
  std::vector<Part> owns_;  // this rank's own parts of spans between own and encode_sum
};

}  // namespace hybridcomp
