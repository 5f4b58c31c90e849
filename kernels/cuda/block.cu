// Block quantization to HC_BITS bits: `int8`, `int4`, `int2`. Kernels' names end in the type read or, of
// decoders, in the types computed in and written.
#include "block_hadamard.cuh"
#include "block_plain.cuh"

// Blocks of 32, 64 ... 512 (_q4) and of 1024 (_q8), to nearest and without offsets. `prefix`: where the
// payload begins, or null.
#define HC_ENCODE_PLAIN(name, D, Quads, threads)                                                          \
  HC_KERNEL(threads)                                                                                      \
  name(const void* src, std::uint64_t n, std::uint32_t block, std::uint8_t* prefix, std::uint8_t* scales, \
       std::uint8_t* packed) {                                                                            \
    hybridcomp::write_prefix(prefix, {block, 0, 0});                                                      \
    hybridcomp::encode_plain<Quads>(hybridcomp::Plain<D>(src), n, block, scales, packed);                 \
  }
#define HC_ENCODE_Q4(name, D) HC_ENCODE_PLAIN(name, D, 4, hybridcomp::kThreads)
#define HC_ENCODE_Q8(name, D) HC_ENCODE_PLAIN(name, D, 8, hybridcomp::kFewThreads)
HC_EACH_INPUT(HC_ENCODE_Q4, encode_q4)
HC_EACH_INPUT(HC_ENCODE_Q8, encode_q8)

// Every other form without a transform: by groups of lanes, or (_long) with a block of threads for each
// block.
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

#define HC_DECODE_PLAIN(name, T, D, Add)                                                             \
  HC_KERNEL(hybridcomp::kThreads)                                                                    \
  name(const std::uint8_t* scales, const std::uint8_t* packed, std::uint64_t n, std::uint32_t block, \
       void* out, const std::uint32_t* status) {                                                     \
    hybridcomp::decode_plain<T, D, Add>(scales, packed, n, block, out, status);                      \
  }
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
