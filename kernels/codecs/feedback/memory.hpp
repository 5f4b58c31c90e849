// Memory of one key of error feedback, the interface of every form; needs no Python. The forms are in
// memories.hpp.
//
// A memory belongs to one array that is sent again and again, whole or in spans (the chunks of a collective).
// Data are corrected, encoded, and decoded as the receiver will decode them; the memory keeps the error of
// that. A span whose step is not finite leaves its state as it was, so that a step that a gradient scaler
// skips spoils nothing.
//
// In a reduction each rank owns a shard: it sums all ranks' parts of it and encodes the sum once more. For
// every span that it owns it calls, in this order: own, then adds the other ranks' messages to the sums,
// encode_sum, and, where the form tracks, result with the decoded values, as it does for the spans of the
// other ranks. States are in units of the sum over all ranks, for a mean too.
//
// Spans of one step have no elements in common. They may be worked on in any order, but one after another: a
// memory is not for several threads at once. Messages hold elements of kind(). Sums, values and decoded data
// are aligned and of that type; x is of any alignment and any type that has it as accumulator. Nothing throws
// but std::bad_alloc, when a size is seen first: memory for intermediate values comes from the pool
// (rooms.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "codecs/common/kernels.hpp"
#include "codecs/common/rooms.hpp"
#include "codecs/messages/encoder.hpp"

namespace hybridcomp {

class Memory {
 public:
  // Make a memory of n elements, for float data, or with `wide` for doubles; many may share `rooms`.
  Memory(std::size_t n, bool wide, std::shared_ptr<Rooms> rooms);
  virtual ~Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::size_t size() const { return n_; }
  DTypeCode kind() const { return wide_ ? kFloat64 : kFloat32; }

  // Whether the receiver adds messages to an estimate that it has (result), rather than take them as they
  // are.
  virtual bool tracks() const { return false; }

  // Whether a rank adds its own part of its shard as it is: then own() does no more than convert it, and need
  // not be called.
  virtual bool adds_own() const { return true; }

  // Whether own() encodes x, to add the decoded message.
  virtual bool sends_own() const { return false; }

  // Begin a step, of one or of many spans; returns its number, from 0.
  virtual std::uint64_t begin() { return steps++; }
  std::uint64_t steps = 0;  // calls of begin()

  // Grows where what a user has kept of this memory from one step to the next holds no longer: another one is
  // in its place, or it is about to be set up otherwise.
  std::uint64_t version = 0;

  // -- a sender --------------------------------------------------------------------------------------------

  // Encode elements start .. start + n, corrected, and keep the message's error. x is not changed. `out` has
  // room for encoder.bound(n, kind()) bytes, which is not 0. Returns the message's bytes; 0 if its payload is
  // not decoded by decode_payload.
  virtual std::size_t encode(const Kernels& k, const Encoder& encoder, const std::uint8_t* x, DTypeCode dtype,
                             std::size_t n, std::size_t start, int threads, std::uint8_t* out);

  // The two halves of encode, for codecs that have no Encoder: correct() writes the data to encode to `out`;
  // keep() then keeps a message's error, unless that is not finite. `decoded` is used up. `weight`: ranks,
  // where the message is of a mean over them.
  virtual void correct(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t n,
                       std::size_t start, int threads, std::uint8_t* out) = 0;
  virtual void keep(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n,
                    std::size_t start, double weight, int threads) = 0;

  // Whether keep() may follow: where the form needs it, correct() of as many elements must have come before.
  virtual bool corrected(std::size_t) const { return true; }

  // -- the owner of a span ---------------------------------------------------------------------------------

  // Write this rank's own part of an owned span to `sums`, to which the other ranks' parts are added then. x
  // must stay as it is until encode_sum. Returns false if the codec's payloads are not decoded by
  // decode_payload.
  virtual bool own(const Kernels& k, const Encoder& encoder, const std::uint8_t* x, DTypeCode dtype,
                   std::size_t n, std::size_t start, int threads, std::uint8_t* sums);

  // Encode the sum of an owned span, over `ranks` for a mean (1 for a sum); `total` is used up. `out` and the
  // return value are as in encode.
  virtual std::size_t encode_sum(const Kernels& k, const Encoder& encoder, std::uint8_t* total, std::size_t n,
                                 std::size_t start, int ranks, int threads, std::uint8_t* out);

  // The two halves of encode_sum: correct_sum() turns the sum, in place, into the data to encode; keep_sum()
  // then keeps a message's error, and is not called where the form tracks.
  virtual void correct_sum(const Kernels& k, std::uint8_t* total, std::size_t n, std::size_t start, int ranks,
                           int threads);
  virtual void keep_sum(const Kernels& k, const std::uint8_t* corrected, Lease& decoded, std::size_t n,
                        std::size_t start, int ranks, int threads);

  // Whether encode_sum may follow: where the form needs it, own() of the span must have come before.
  virtual bool owned(std::size_t, std::size_t) const { return true; }

  // Turn the decoded values of encode_sum's message into the result, in place: called for every span, owned
  // or not, where the form tracks.
  virtual void result(const Kernels&, std::uint8_t*, std::size_t, std::size_t, int) {}

  // -- the state -------------------------------------------------------------------------------------------

  // Return an array of the state, in its own memory until a step replaces it; "" is the main one. Null if the
  // form has none of this name, or, unless `make`, has not needed it yet.
  virtual RoomPointer state(std::string_view name, bool make) = 0;

  // Bytes of an element of the main state.
  virtual std::size_t state_size() const { return size_of(kind()); }

 protected:
  Lease lease(std::size_t n) const { return Lease(*rooms_, n * size_of(kind())); }
  RoomPointer zeros() const { return std::make_shared<Room>(n_ * size_of(kind()), true); }

  // Return the place of an element in an array of the state.
  std::uint8_t* at(const RoomPointer& state, std::size_t element) const {
    return state->data() + element * size_of(kind());
  }

  // Put `fresh` at elements start .. start + n of an array of the state: by exchange, if that is the whole
  // array.
  void replace(RoomPointer& state, Lease& fresh, std::size_t n, std::size_t start) const;

  // Decode a message that this memory encoded; returns whether that could be done.
  bool decode(const Kernels& k, const Encoder& encoder, const std::uint8_t* message, std::size_t bytes,
              std::size_t n, int threads, std::uint8_t* out) const;

  const std::size_t n_;
  const bool wide_;
  const std::shared_ptr<Rooms> rooms_;
};

}  // namespace hybridcomp
