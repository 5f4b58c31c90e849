// Passes of error feedback around codecs whose kernels do not do it; states are in device memory. A value
// that is not finite sets the word `bad`, which tells later kernels to leave a state as it was: the host
// never looks.
//
// A state may be exchanged with another array when it is renewed. Its address is then in device memory too: a
// slot, of one word.
#include "common/table.cuh"
#include "feedback/passes.cuh"

namespace hybridcomp {
namespace {

template <typename Word>
HC_DEVICE void copy_words(Grid grid, uint8_t* to, const uint8_t* from, uint64_t begin, uint64_t end) {
  const uint64_t words = (end - begin) / sizeof(Word);
  for (uint64_t i = grid.thread(); i < words; i += grid.threads())
    reinterpret_cast<Word*>(to + begin)[i] = reinterpret_cast<const Word*>(from + begin)[i];
}

// Copy `bytes` to the address `direct`, or to `start` bytes after that in `slot`, unless one of two words is
// set (null is not).
HC_DEVICE void commit(Grid grid, uint8_t* direct, const uint64_t* slot, uint64_t start, const uint8_t* from,
                      uint64_t bytes, const uint32_t* bad, const uint32_t* also) {
  if ((bad && *bad) || (also && *also)) return;
  uint8_t* const to = address<uint8_t>(direct, slot, start);
  uint64_t whole = 0;
  if (aligned_to(to, 16) && aligned_to(from, 16)) {
    whole = bytes / 16 * 16;
    copy_words<uint4>(grid, to, from, 0, whole);
  } else if (aligned_to(to, 4) && aligned_to(from, 4)) {
    whole = bytes / 4 * 4;
    copy_words<uint32_t>(grid, to, from, 0, whole);
  }
  copy_words<uint8_t>(grid, to, from, whole, bytes);
}

// Exchange two states, unless *bad, which is zero afterwards.
HC_DEVICE void exchange(Grid grid, uint64_t* a, uint64_t* b, uint32_t* bad) {
  if (grid.thread() != 0) return;
  if (!*bad) {
    const uint64_t held = *a;
    *a = *b;
    *b = held;
  }
  *bad = 0;
}

}  // namespace

HC_KERNEL(kThreads)
feedback_commit(uint8_t* direct, const uint64_t* slot, uint64_t start, const uint8_t* from, uint64_t bytes,
                const uint32_t* bad, const uint32_t* also) {
  commit(whole_grid(), direct, slot, start, from, bytes, bad, also);
}
HC_TABLE_FORM(kThreads, feedback_commit, commit)

HC_KERNEL(32) feedback_exchange(uint64_t* a, uint64_t* b, uint32_t* bad) {
  exchange(whole_grid(), a, b, bad);
}
HC_TABLE_FORM(32, feedback_exchange, exchange)

HC_KERNEL(32) feedback_point(uint64_t* slot, uint64_t to) {
  if (global_thread() == 0) *slot = to;
}

// Set all bytes of a state to zero. States are aligned to 16 bytes.
HC_KERNEL(kThreads) feedback_clear(const uint64_t* slot, uint64_t bytes) {
  uint8_t* const to = reinterpret_cast<uint8_t*>(*slot);
  for (uint64_t i = global_thread(); i < bytes / 4; i += global_threads())
    reinterpret_cast<uint32_t*>(to)[i] = 0;
}

}  // namespace hybridcomp

#define HC_FEEDBACK_ADD(name, D, Subtract)                                                                 \
  HC_KERNEL(hybridcomp::kThreads)                                                                          \
  name(const void* x, std::uint64_t n, void* e, const std::uint64_t* slot, std::uint64_t start, void* out, \
       std::uint32_t* bad) {                                                                               \
    hybridcomp::add<D, Subtract>(hybridcomp::whole_grid(), x, n, e, slot, start, out, bad);                \
  }                                                                                                        \
  HC_TABLE_FORM(hybridcomp::kThreads, name, hybridcomp::add<D, Subtract>)
#define HC_FEEDBACK_PLUS(name, D) HC_FEEDBACK_ADD(name, D, false)
#define HC_FEEDBACK_MINUS(name, D) HC_FEEDBACK_ADD(name, D, true)
HC_EACH_INPUT(HC_FEEDBACK_PLUS, feedback_add)
HC_EACH_INPUT(HC_FEEDBACK_MINUS, feedback_subtract)

// Floating-point parameters are given as the bits of the computing type.
#define HC_FEEDBACK_BLEND(name, D)                                                                   \
  HC_KERNEL(hybridcomp::kThreads)                                                                    \
  name(const void* x, std::uint64_t n, const void* momentum, std::uint64_t beta, std::uint64_t rest, \
       const std::uint64_t* slot, std::uint64_t start, void* out, std::uint32_t* bad) {              \
    using Bits = hybridcomp::Real<hybridcomp::ComputeOf<D>>::Bits;                                   \
    hybridcomp::blend<D>(hybridcomp::whole_grid(), x, n, momentum, static_cast<Bits>(beta),          \
                         static_cast<Bits>(rest), slot, start, out, bad);                            \
  }                                                                                                  \
  HC_TABLE_FORM(hybridcomp::kThreads, name, hybridcomp::blend<D>)
HC_EACH_INPUT(HC_FEEDBACK_BLEND, feedback_blend)

#define HC_FEEDBACK_MOVE(name, D)                                                                            \
  HC_KERNEL(hybridcomp::kThreads)                                                                            \
  name(const void* x, const hybridcomp::ComputeOf<D>* velocity, const hybridcomp::ComputeOf<D>* sum,         \
       hybridcomp::ComputeOf<D>* next, hybridcomp::ComputeOf<D>* out, std::uint64_t n,                       \
       std::uint64_t momentum) {                                                                             \
    using T = hybridcomp::ComputeOf<D>;                                                                      \
    hybridcomp::move<D>(                                                                                     \
        {static_cast<const hybridcomp::StorageOf<D>*>(x), velocity, sum, next, out, HC_NUMBER(T, momentum)}, \
        n);                                                                                                  \
  }
#define HC_NUMBER(T, bits) hybridcomp::float_of(static_cast<hybridcomp::Real<T>::Bits>(bits))
HC_EACH_INPUT(HC_FEEDBACK_MOVE, feedback_move)

#define HC_FEEDBACK_ACCELERATE(name, D)                                                                     \
  HC_KERNEL(hybridcomp::kThreads)                                                                           \
  name(const void* x, const hybridcomp::ComputeOf<D>* velocity, hybridcomp::ComputeOf<D>* next,             \
       hybridcomp::ComputeOf<D>* out, std::uint64_t n, std::uint64_t momentum, std::uint32_t* bad) {        \
    using T = hybridcomp::ComputeOf<D>;                                                                     \
    hybridcomp::accelerate<D>(                                                                              \
        {static_cast<const hybridcomp::StorageOf<D>*>(x), velocity, next, out, HC_NUMBER(T, momentum), {}}, \
        n, bad);                                                                                            \
  }
HC_EACH_INPUT(HC_FEEDBACK_ACCELERATE, feedback_accelerate)

#define HC_FEEDBACK_OF(t, T)                                                                                \
  HC_KERNEL(hybridcomp::kThreads)                                                                           \
  feedback_lose_##t(const T* corrected, const T* decoded, void* out, const std::uint64_t* slot,             \
                    std::uint64_t n, std::uint64_t weight, std::uint32_t* bad) {                            \
    hybridcomp::lose<T>(hybridcomp::whole_grid(), corrected, decoded, out, slot, n,                         \
                        static_cast<hybridcomp::Real<T>::Bits>(weight), bad);                               \
  }                                                                                                         \
  HC_TABLE_FORM(hybridcomp::kThreads, feedback_lose_##t, hybridcomp::lose<T>)                               \
  HC_KERNEL(hybridcomp::kThreads)                                                                           \
  feedback_average_##t(const T* corrected, const T* decoded, T* e, std::uint64_t n, std::uint64_t weight,   \
                       std::uint64_t beta, std::uint64_t rest, std::uint32_t* bad) {                        \
    hybridcomp::average<T>(                                                                                 \
        {corrected, decoded, e, HC_NUMBER(T, weight), HC_NUMBER(T, beta), HC_NUMBER(T, rest), {}}, n, bad); \
  }                                                                                                         \
  HC_KERNEL(hybridcomp::kThreads)                                                                           \
  feedback_mask_##t(const T* corrected, T* decoded, T* next, std::uint64_t n, std::uint32_t* bad) {         \
    hybridcomp::mask<T>({corrected, decoded, next, {}}, n, bad);                                            \
  }                                                                                                         \
  HC_KERNEL(hybridcomp::kThreads) feedback_divide_##t(T* x, std::uint64_t n, std::uint64_t by) {            \
    hybridcomp::divide<T>(hybridcomp::whole_grid(), x, n, static_cast<hybridcomp::Real<T>::Bits>(by));      \
  }                                                                                                         \
  HC_TABLE_FORM(hybridcomp::kThreads, feedback_divide_##t, hybridcomp::divide<T>)                           \
  HC_KERNEL(hybridcomp::kThreads) feedback_look_##t(const T* x, std::uint64_t n, std::uint32_t* any) {      \
    hybridcomp::look<T>({x, false}, n, any);                                                                \
  }                                                                                                         \
  HC_KERNEL(hybridcomp::kThreads)                                                                           \
  feedback_take_out_##t(T* total, T* mine, std::uint64_t n, const std::uint32_t* any) {                     \
    hybridcomp::take_out<T>({total, mine}, n, any);                                                         \
  }
HC_FEEDBACK_OF(f32, float)
HC_FEEDBACK_OF(f64, double)
