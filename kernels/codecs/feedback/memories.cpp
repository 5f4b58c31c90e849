#include "codecs/feedback/memories.hpp"

#include <cstring>
#include <utility>

#include "codecs/feedback/passes.hpp"

namespace hybridcomp {

// -- ef ----------------------------------------------------------------------------------------------------

PlainMemory::PlainMemory(std::size_t n, bool wide, std::shared_ptr<Rooms> rooms)
    : Memory(n, wide, std::move(rooms)), error_(zeros()) {}

std::size_t PlainMemory::encode_fused(const Kernels& k, const Encoder& encoder, const Source& x,
                                      std::size_t n, std::size_t start, int ranks, int threads,
                                      std::uint8_t* out, bool* kept) {
  const CodecIdentity& codec = encoder.identity;
  const bool blocks = fusible(codec);
  if (!blocks && !codec.sparse && !is_sign(codec)) return 0;
  std::uint8_t* const error = at(error_, start);
  const bool streams = n == n_ && n * size_of(kind()) >= kStreamed;
  if (is_sign(codec) && !streams)
    return encode_few_signs(k, codec, x, n, error, ranks, threads, *rooms_, out, kept);
  // An error that is sure to be finite is written in place. A whole array, which no cache may hold, is read
  // once, and the quantizers write its error to an array that takes the state's place.
  const bool modest = (codec.sparse || n < n_) && modest_pass(k, x, error, n, threads);
  *kept = true;
  if (codec.sparse) return modest ? encode_sparse_residual(k, encoder, x, n, error, ranks, threads, out) : 0;
  if (modest) return encode_residual(k, codec, x, n, error, error, ranks, threads, out, kept);
  Lease lost = lease(n);
  const std::size_t bytes =
      is_sign(codec) ? encode_signs(k, codec, x, n, error, lost.data(), ranks, threads, *rooms_, out, kept)
                     : encode_residual(k, codec, x, n, error, lost.data(), ranks, threads, out, kept);
  if (*kept) replace(error_, lost, n, start);
  return bytes;
}

std::size_t PlainMemory::encode(const Kernels& k, const Encoder& encoder, const std::uint8_t* x,
                                DTypeCode dtype, std::size_t n, std::size_t start, int threads,
                                std::uint8_t* out) {
  bool kept = false;
  const std::size_t bytes =
      encode_fused(k, encoder, source(x, dtype, start), n, start, 1, threads, out, &kept);
  return bytes ? bytes : Memory::encode(k, encoder, x, dtype, n, start, threads, out);
}

void PlainMemory::correct(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t n,
                          std::size_t start, int threads, std::uint8_t* out) {
  add_pass(k, source(x, dtype, start), at(error_, start), out, n, false, threads);
}

// A momentum is of each rank's own data: the owner adds its own, and the sum, which has that of all ranks,
// gets no more.
bool PlainMemory::own(const Kernels& k, const Encoder& encoder, const std::uint8_t* x, DTypeCode dtype,
                      std::size_t n, std::size_t start, int threads, std::uint8_t* sums) {
  if (!momentum_) return Memory::own(k, encoder, x, dtype, n, start, threads, sums);
  blend_pass(k, source(x, dtype, start), sums, n, threads);
  return true;
}

void PlainMemory::correct_sum(const Kernels& k, std::uint8_t* total, std::size_t n, std::size_t start,
                              int ranks, int threads) {
  add_pass(k, {total, kind()}, at(error_, start), total, n, false, threads);
  divide_pass(k, total, wide_, n, ranks, threads);
}

void PlainMemory::blend(const std::uint8_t* momentum, double beta) {
  momentum_ = momentum;
  beta_ = beta;
}

Source PlainMemory::source(const std::uint8_t* x, DTypeCode dtype, std::size_t start) const {
  return {x, dtype, momentum_ ? momentum_ + start * size_of(kind()) : nullptr, beta_};
}

void PlainMemory::keep(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n,
                       std::size_t start, double weight, int threads) {
  keep_finite(k, corrected, decoded, n, start, weight, threads);
}

bool PlainMemory::keep_finite(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n,
                              std::size_t start, double weight, int threads) {
  if (!lose_pass(k, corrected, decoded.data(), decoded.data(), wide_, n, weight, threads)) return false;
  replace(error_, decoded, n, start);
  return true;
}

std::size_t PlainMemory::encode_sum(const Kernels& k, const Encoder& encoder, std::uint8_t* total,
                                    std::size_t n, std::size_t start, int ranks, int threads,
                                    std::uint8_t* out) {
  bool kept = false;
  const std::size_t bytes = encode_fused(k, encoder, {total, kind()}, n, start, ranks, threads, out, &kept);
  return bytes ? bytes : Memory::encode_sum(k, encoder, total, n, start, ranks, threads, out);
}

RoomPointer PlainMemory::state(std::string_view name, bool) { return name.empty() ? error_ : nullptr; }

// -- ef-sgdm -----------------------------------------------------------------------------------------------

AcceleratedMemory::AcceleratedMemory(std::size_t n, bool wide, std::shared_ptr<Rooms> rooms, double momentum)
    : PlainMemory(n, wide, std::move(rooms)), momentum_(momentum), velocity_(zeros()) {}

bool AcceleratedMemory::accelerate(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t n,
                                   std::size_t start, int threads, std::uint8_t* moved,
                                   std::uint8_t* out) const {
  return accelerate_pass(k, x, dtype, at(velocity_, start), moved, out, n, momentum_, threads);
}

std::size_t AcceleratedMemory::encode(const Kernels& k, const Encoder& encoder, const std::uint8_t* x,
                                      DTypeCode dtype, std::size_t n, std::size_t start, int threads,
                                      std::uint8_t* out) {
  if (fusible(encoder.identity) || encoder.identity.sparse || is_sign(encoder.identity)) {
    const Lease step = lease(n);
    Lease moved = lease(n);
    accelerate(k, x, dtype, n, start, threads, moved.data(), step.data());
    bool kept = false;
    const std::size_t bytes =
        encode_fused(k, encoder, {step.data(), kind()}, n, start, 1, threads, out, &kept);
    if (bytes && kept) replace(velocity_, moved, n, start);
    if (bytes) return bytes;
  }
  return Memory::encode(k, encoder, x, dtype, n, start, threads, out);
}

void AcceleratedMemory::correct(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t n,
                                std::size_t start, int threads, std::uint8_t* out) {
  moved_.release();
  moved_ = lease(n);
  moving_ = n;
  accelerate(k, x, dtype, n, start, threads, moved_.data(), out);
  PlainMemory::correct(k, out, kind(), n, start, threads, out);
}

void AcceleratedMemory::keep(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n,
                             std::size_t start, double weight, int threads) {
  if (keep_finite(k, corrected, decoded, n, start, weight, threads)) replace(velocity_, moved_, n, start);
  moved_.release();
}

// Momentum is each rank's own: the owner adds its data with momentum, and the sum, which has that of all
// ranks, gets no more.
bool AcceleratedMemory::own(const Kernels& k, const Encoder&, const std::uint8_t* x, DTypeCode dtype,
                            std::size_t n, std::size_t start, int threads, std::uint8_t* sums) {
  Lease moved = lease(n);
  if (accelerate(k, x, dtype, n, start, threads, moved.data(), sums)) replace(velocity_, moved, n, start);
  return true;
}

void AcceleratedMemory::keep_sum(const Kernels& k, const std::uint8_t* corrected, Lease& decoded,
                                 std::size_t n, std::size_t start, int ranks, int threads) {
  keep_finite(k, corrected, decoded, n, start, ranks, threads);
}

RoomPointer AcceleratedMemory::state(std::string_view name, bool make) {
  return name == "velocity" ? velocity_ : PlainMemory::state(name, make);
}

// -- loco --------------------------------------------------------------------------------------------------

namespace {

constexpr std::size_t kSections = sizeof(Header) + sizeof(QuantizePrefix);

}  // namespace

AverageMemory::AverageMemory(std::size_t n, bool wide, std::shared_ptr<Rooms> rooms, double beta,
                             std::uint64_t reset_steps)
    : Memory(n, wide, std::move(rooms)),
      beta_(beta),
      reset_steps_(reset_steps),
      message_(std::make_shared<Room>(kSections + state_scales(n, wide) + n, true)) {
  const QuantizePrefix prefix{kStateBlock, 0};
  std::memcpy(message_->data() + sizeof(Header), &prefix, sizeof(prefix));
}

std::uint64_t AverageMemory::begin() {
  const std::uint64_t step = Memory::begin();
  if (step && step % reset_steps_ == 0)
    std::memset(message_->data() + kSections, 0, message_->bytes() - kSections);
  return step;
}

State8 AverageMemory::sections() const {
  std::uint8_t* const scales = message_->data() + kSections;
  return {scales, scales + state_scales(n_, wide_), n_};
}

Lease AverageMemory::fresh(std::size_t n, std::size_t start) const {
  return Lease(*rooms_, state_bytes(start, n, wide_));
}

std::size_t AverageMemory::encode(const Kernels& k, const Encoder& encoder, const std::uint8_t* x,
                                  DTypeCode dtype, std::size_t n, std::size_t start, int threads,
                                  std::uint8_t* out) {
  const CodecIdentity& codec = encoder.identity;
  // The span, and the kernel's tiles, must be whole blocks of the state too.
  const std::size_t stop = start + n;
  const bool whole = start % kStateBlock == 0 && (stop % kStateBlock == 0 || stop == n_);
  if (!fusible(codec) || !whole || fused_tile(codec.block) % kStateBlock)
    return Memory::encode(k, encoder, x, dtype, n, start, threads, out);
  const Lease scratch = fresh(n, start);
  bool finite = true;
  return encode_average(k, codec, x, dtype, start, n, sections(), scratch.data(), beta_, threads, out,
                        &finite);
}

void AverageMemory::correct(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t n,
                            std::size_t start, int threads, std::uint8_t* out) {
  correct_average(k, x, dtype, start, n, sections(), out, threads);
}

void AverageMemory::keep(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n,
                         std::size_t start, double weight, int threads) {
  const Lease scratch = fresh(n, start);
  keep_average(k, corrected, decoded.data(), wide_, start, n, sections(), scratch.data(), weight, beta_,
               threads);
}

RoomPointer AverageMemory::state(std::string_view name, bool) { return name.empty() ? message_ : nullptr; }

// -- dgc ---------------------------------------------------------------------------------------------------

MomentumMemory::MomentumMemory(std::size_t n, bool wide, std::shared_ptr<Rooms> rooms, double momentum)
    : Memory(n, wide, std::move(rooms)), momentum_(momentum), sum_(zeros()), velocity_(zeros()) {}

void MomentumMemory::correct(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t n,
                             std::size_t start, int threads, std::uint8_t* out) {
  moved_.release();
  moved_ = lease(n);
  moving_ = n;
  move_pass(k, x, dtype, at(velocity_, start), at(sum_, start), moved_.data(), out, n, momentum_, threads);
}

void MomentumMemory::keep(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n,
                          std::size_t start, double, int threads) {
  if (mask_pass(k, corrected, decoded.data(), moved_.data(), wide_, n, threads)) {
    replace(sum_, decoded, n, start);
    replace(velocity_, moved_, n, start);
  }
  moved_.release();
}

// The owner's part is a decoded message of its own, which it sends to nobody, so that all ranks weigh alike.
bool MomentumMemory::own(const Kernels& k, const Encoder& encoder, const std::uint8_t* x, DTypeCode dtype,
                         std::size_t n, std::size_t start, int threads, std::uint8_t* sums) {
  const Lease message(*rooms_, encoder.bound(n, kind()));
  const std::size_t bytes = encode(k, encoder, x, dtype, n, start, threads, message.data());
  return bytes && decode(k, encoder, message.data(), bytes, n, threads, sums);
}

void MomentumMemory::correct_sum(const Kernels& k, std::uint8_t* total, std::size_t n, std::size_t, int ranks,
                                 int threads) {
  divide_pass(k, total, wide_, n, ranks, threads);
}

// The error of the sum's message is added to the owner's unsent sum, unless the result is not finite.
void MomentumMemory::keep_sum(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n,
                              std::size_t start, int ranks, int threads) {
  std::uint8_t* const lost = decoded.data();
  if (lose_pass(k, corrected, lost, lost, wide_, n, ranks, threads) &&
      add_pass(k, {at(sum_, start), kind()}, lost, lost, n, false, threads))
    replace(sum_, decoded, n, start);
}

RoomPointer MomentumMemory::state(std::string_view name, bool) {
  if (name == "velocity") return velocity_;
  return name.empty() ? sum_ : nullptr;
}

}  // namespace hybridcomp
