// Block quantization to HC_BITS bits: `int8`, `int4`, `int2`. Kernels' names end in the type read or, for
// decoders, in the types computed in and written.
#include "block/block_average.cuh"
#include "block/block_feedback.cuh"
#include "block/block_hadamard.cuh"

namespace hybridcomp {
namespace {

template <DTypeCode D, int Quads>
HC_DEVICE void encode_message(Grid grid, const void* src, uint64_t n, uint32_t block, uint8_t* prefix,
                              uint8_t* scales, uint8_t* packed) {
  const Form form{block, 0, 0};
  write_prefix(prefix, form, grid);
  encode_plain<Quads>(grid, Plain<D>(src), form, n, scales, packed);
}

template <DTypeCode D, int Quads>
HC_DEVICE void encode_corrected(Grid grid, const void* x, uint64_t n, uint32_t block, const uint64_t* slot,
                                uint64_t start, void* fresh, const uint64_t* to, uint32_t* bad,
                                uint8_t* prefix, uint8_t* scales, uint8_t* packed) {
  const Form form{block, 0, 0};
  write_prefix(prefix, form, grid);
  encode_plain<Quads>(grid, corrected<D>(x, slot, start, fresh, to, bad), form, n, scales, packed);
}

template <typename T>
HC_DEVICE void add_messages(Grid grid, T* acc, uint64_t n, uint32_t block_and_peers, const uint32_t* status,
                            const uint8_t* m0, const uint8_t* m1, const uint8_t* m2, const uint8_t* m3,
                            const uint8_t* m4, const uint8_t* m5, const uint8_t* m6, const uint8_t* m7,
                            const uint8_t* m8, const uint8_t* m9, const uint8_t* m10, const uint8_t* m11,
                            const uint8_t* m12, const uint8_t* m13, const uint8_t* m14, const uint8_t* m15) {
  const Messages messages{{m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15}};
  sum_plain(grid, messages, block_and_peers & 31u, n, block_and_peers & ~31u, acc, status);
}

}  // namespace
}  // namespace hybridcomp

// Encode blocks of 32, 64 ... 512 (_q4) and of 1024 (_q8), to nearest and without offsets. `prefix`: start of
// the payload, or null.
#define HC_ENCODE_PLAIN(name, D, Quads, threads)                                                           \
  HC_KERNEL(threads)                                                                                       \
  name(const void* src, std::uint64_t n, std::uint32_t block, std::uint8_t* prefix, std::uint8_t* scales,  \
       std::uint8_t* packed) {                                                                             \
    hybridcomp::encode_message<D, Quads>(hybridcomp::whole_grid(), src, n, block, prefix, scales, packed); \
  }                                                                                                        \
  HC_TABLE_FORM(threads, name, hybridcomp::encode_message<D, Quads>)
#define HC_ENCODE_Q4(name, D) HC_ENCODE_PLAIN(name, D, 4, hybridcomp::kThreads)
#define HC_ENCODE_Q8(name, D) HC_ENCODE_PLAIN(name, D, 8, hybridcomp::kFewThreads)
HC_EACH_INPUT(HC_ENCODE_Q4, encode_q4)
HC_EACH_INPUT(HC_ENCODE_Q8, encode_q8)

// Encode every other form without a transform: by groups of lanes, or (_long) with a block of threads for
// each block.
#define HC_ENCODE_FORM(name, D, encode)                                                                \
  HC_KERNEL(hybridcomp::kThreads)                                                                      \
  name(const void* src, std::uint64_t n, std::uint32_t block, std::uint32_t flags, std::uint64_t seed, \
       std::uint8_t* prefix, std::uint8_t* scales, std::uint8_t* packed) {                             \
    const hybridcomp::Form form{block, flags, seed};                                                   \
    hybridcomp::write_prefix(prefix, form);                                                            \
    hybridcomp::encode(hybridcomp::Plain<D>(src), form, n, scales, packed);                            \
  }
#define HC_ENCODE_ANY(name, D) HC_ENCODE_FORM(name, D, encode_groups)
#define HC_ENCODE_LONG(name, D) HC_ENCODE_FORM(name, D, encode_long)
HC_EACH_INPUT(HC_ENCODE_ANY, encode_any)
HC_EACH_INPUT(HC_ENCODE_LONG, encode_long)

#define HC_ENCODE_HADAMARD(name, D)                                                                    \
  HC_KERNEL(hybridcomp::kThreads)                                                                      \
  name(const void* src, std::uint64_t n, std::uint32_t block, std::uint32_t flags, std::uint64_t seed, \
       std::uint8_t* prefix, std::uint8_t* scales, std::uint8_t* packed) {                             \
    const hybridcomp::Form form{block, flags, seed};                                                   \
    hybridcomp::write_prefix(prefix, form);                                                            \
    hybridcomp::encode_hadamard<D>(src, n, form, scales, packed);                                      \
  }
HC_EACH_INPUT(HC_ENCODE_HADAMARD, encode_hadamard)

#define HC_DECODE_PLAIN(name, T, D, Add)                                                                  \
  HC_KERNEL(hybridcomp::kThreads)                                                                         \
  name(const std::uint8_t* scales, const std::uint8_t* packed, std::uint64_t n, std::uint32_t block,      \
       void* out, const std::uint32_t* status) {                                                          \
    hybridcomp::decode_plain<T, D, Add>(hybridcomp::whole_grid(), scales, packed, n, block, out, status); \
  }                                                                                                       \
  HC_TABLE_FORM(hybridcomp::kThreads, name, hybridcomp::decode_plain<T, D, Add>)
HC_EACH_OUTPUT(HC_DECODE_PLAIN, decode_plain)

#define HC_DECODE_ANY(name, T, D, Add)                                                               \
  HC_KERNEL(hybridcomp::kThreads)                                                                    \
  name(const std::uint8_t* scales, const std::uint8_t* packed, std::uint64_t n, std::uint32_t block, \
       std::uint32_t flags, void* out, const std::uint32_t* status) {                                \
    hybridcomp::decode_any<T, D, Add>(scales, packed, n, block, flags, out, status);                 \
  }
HC_EACH_OUTPUT(HC_DECODE_ANY, decode_any)

#define HC_DECODE_HADAMARD(name, T, D, Add)                                                          \
  HC_KERNEL(hybridcomp::kThreads)                                                                    \
  name(const std::uint8_t* scales, const std::uint8_t* packed, std::uint64_t n, std::uint32_t block, \
       std::uint32_t flags, std::uint64_t seed, void* out, const std::uint32_t* status) {            \
    hybridcomp::decode_hadamard<T, D, Add>(scales, packed, n, block, flags, seed, out, status);      \
  }
HC_EACH_OUTPUT(HC_DECODE_HADAMARD, decode_hadamard)

// Do error feedback in one pass: write the message of x + e, and its error. All to nearest, without offsets.
#define HC_ENCODE_FEEDBACK(name, D, threads, encode)                                                         \
  HC_KERNEL(threads)                                                                                         \
  name(const void* x, std::uint64_t n, std::uint32_t block, const std::uint64_t* slot, std::uint64_t start,  \
       void* fresh, const std::uint64_t* to, std::uint32_t* bad, std::uint8_t* prefix, std::uint8_t* scales, \
       std::uint8_t* packed) {                                                                               \
    const hybridcomp::Form form{block, 0, 0};                                                                \
    hybridcomp::write_prefix(prefix, form);                                                                  \
    encode(hybridcomp::corrected<D>(x, slot, start, fresh, to, bad), form, n, scales, packed);               \
  }
#define HC_FEEDBACK_PLAIN(name, D, Quads)                                                                    \
  HC_KERNEL(hybridcomp::kFewThreads)                                                                         \
  name(const void* x, std::uint64_t n, std::uint32_t block, const std::uint64_t* slot, std::uint64_t start,  \
       void* fresh, const std::uint64_t* to, std::uint32_t* bad, std::uint8_t* prefix, std::uint8_t* scales, \
       std::uint8_t* packed) {                                                                               \
    hybridcomp::encode_corrected<D, Quads>(hybridcomp::whole_grid(), x, n, block, slot, start, fresh, to,    \
                                           bad, prefix, scales, packed);                                     \
  }                                                                                                          \
  HC_TABLE_FORM(hybridcomp::kFewThreads, name, hybridcomp::encode_corrected<D, Quads>)
#define HC_FEEDBACK_Q4(name, D) HC_FEEDBACK_PLAIN(name, D, 4)
#define HC_FEEDBACK_Q8(name, D) HC_FEEDBACK_PLAIN(name, D, 8)
#define HC_FEEDBACK_ANY(name, D) HC_ENCODE_FEEDBACK(name, D, hybridcomp::kThreads, hybridcomp::encode_groups)
#define HC_FEEDBACK_LONG(name, D) HC_ENCODE_FEEDBACK(name, D, hybridcomp::kThreads, hybridcomp::encode_long)
// The _q4 and _q8 forms leave out float64, of which a thread would hold too much: _any and _long take it.
#define HC_EACH_SHORT_INPUT(EACH, name)  \
  EACH(name##_f32, hybridcomp::kFloat32) \
  EACH(name##_f16, hybridcomp::kFloat16) \
  EACH(name##_bf16, hybridcomp::kBFloat16)
HC_EACH_SHORT_INPUT(HC_FEEDBACK_Q4, feedback_q4)
HC_EACH_SHORT_INPUT(HC_FEEDBACK_Q8, feedback_q8)
HC_EACH_INPUT(HC_FEEDBACK_ANY, feedback_any)
HC_EACH_INPUT(HC_FEEDBACK_LONG, feedback_long)

// The same for `loco`, whose state is scales and integers; the new state goes to `fresh_*`. beta and rest = 1
// - beta are given as their bits.
#define HC_FEEDBACK_AVERAGE(name, D)                                                                        \
  HC_KERNEL(hybridcomp::kFewThreads)                                                                        \
  name(const void* x, std::uint64_t n, std::uint32_t block, float* state_scales,                            \
       std::uint8_t* state_integers, float* fresh_scales, std::uint8_t* fresh_integers, std::uint32_t beta, \
       std::uint32_t rest, std::uint32_t* bad, std::uint8_t* prefix, float* scales, std::uint8_t* packed) { \
    hybridcomp::write_prefix(prefix, {block, 0, 0});                                                        \
    hybridcomp::encode_average(                                                                             \
        hybridcomp::Plain<D>(x), n, block, {state_scales, state_integers}, {fresh_scales, fresh_integers},  \
        {hybridcomp::float_of(beta), hybridcomp::float_of(rest), bad}, scales, packed);                     \
  }
HC_EACH_SHORT_INPUT(HC_FEEDBACK_AVERAGE, feedback_average)

// Compute acc += messages, which have the same count and plain form; m0, m1 ... are their scales.
#define HC_DECODE_SUM(name, T)                                                                               \
  HC_KERNEL(hybridcomp::kThreads)                                                                            \
  name(T* acc, std::uint64_t n, std::uint32_t block_and_peers, const std::uint32_t* status,                  \
       const std::uint8_t* m0, const std::uint8_t* m1, const std::uint8_t* m2, const std::uint8_t* m3,       \
       const std::uint8_t* m4, const std::uint8_t* m5, const std::uint8_t* m6, const std::uint8_t* m7,       \
       const std::uint8_t* m8, const std::uint8_t* m9, const std::uint8_t* m10, const std::uint8_t* m11,     \
       const std::uint8_t* m12, const std::uint8_t* m13, const std::uint8_t* m14, const std::uint8_t* m15) { \
    hybridcomp::add_messages<T>(hybridcomp::whole_grid(), acc, n, block_and_peers, status, m0, m1, m2, m3,   \
                                m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15);                       \
  }                                                                                                          \
  HC_TABLE_FORM(hybridcomp::kThreads, name, hybridcomp::add_messages<T>)
HC_DECODE_SUM(decode_sum_f32, float)
HC_DECODE_SUM(decode_sum_f64, double)
