// The shared-scale quantizer: integers of HC_LATTICE_BITS bits. Two passes go over a tensor: `peak` of
// linear.cu, and the one here, which makes the scale from the peak.
#include "common/elements.cuh"
#include "hybridcomp/lattice.hpp"

namespace hybridcomp {
namespace {

constexpr int kBits = HC_LATTICE_BITS;
constexpr int kThreads = 256;
constexpr int kEach = 4;   // elements of a load
constexpr int kLoads = 4;  // loads in flight
constexpr uint64_t kTile = static_cast<uint64_t>(kThreads) * kLoads;

template <int Bits>
struct Integer;
template <>
struct Integer<8> {
  using Type = signed char;
};
template <>
struct Integer<16> {
  using Type = short;
};
template <>
struct Integer<32> {
  using Type = int32_t;
};
using Q = Integer<kBits>::Type;

// Integers that are read and written at once, four or two: a message's begin 8 bytes past a multiple of 16,
// so 32-bit ones go in pairs.
constexpr int kTogether = kBits == 32 ? 2 : kEach;
using Integers = Pack<Q, kTogether>;

HC_DEVICE void load_integers(const Q* q, Q* out) {
#pragma unroll
  for (int i = 0; i < kEach; i += kTogether) {
    const Integers pack = *reinterpret_cast<const Integers*>(q + i);
#pragma unroll
    for (int j = 0; j < kTogether; ++j) out[i + j] = pack.of[j];
  }
}
HC_DEVICE void store_integers(const Q* from, Q* q) {
#pragma unroll
  for (int i = 0; i < kEach; i += kTogether) {
    Integers pack;
#pragma unroll
    for (int j = 0; j < kTogether; ++j) pack.of[j] = from[i + j];
    *reinterpret_cast<Integers*>(q + i) = pack;
  }
}

// Prefix of the payload; the integers follow.
struct Prefix {
  uint32_t bits, ranks, parts, reserved;
  double scale;
};
static_assert(sizeof(Prefix) == 24, "lattice's prefix is 24 bytes on the wire");

// Random bits of elements by their index; the key of the index's high half is drawn again only where that
// changes.
class Draws {
 public:
  __device__ explicit Draws(uint64_t seed) : seed_(seed), high_(0), key_(random_key(seed, 0)) {}
  __device__ uint32_t operator()(uint64_t index) {
    const uint32_t high = static_cast<uint32_t>(index >> 32);
    if (high != high_) {
      high_ = high;
      key_ = random_key(seed_, high);
    }
    return random_bits(key_, static_cast<uint32_t>(index));
  }

 private:
  uint64_t seed_;
  uint32_t high_;
  RandomKey key_;
};

template <typename C, typename T, bool Random>
HC_DEVICE Q rounded(T x, C inverse, int32_t limit, Draws& draws, uint64_t index) {
  if constexpr (Random)
    return static_cast<Q>(lattice_stochastic<C>(static_cast<C>(x), inverse, limit, draws(index)));
  else
    return static_cast<Q>(lattice_nearest<C>(static_cast<C>(x), inverse));
}

// Write the integers, and with a payload its prefix. The tiles go from the last to the first: the cache still
// holds the tiles that the pass for the peak read last.
template <DTypeCode D, bool Random>
HC_DEVICE void quantize(const void* from, uint64_t n, const uint64_t* peak, int32_t limit, uint64_t seed,
                        uint32_t ranks, Prefix* prefix, Q* q) {
  using T = ComputeOf<D>;
  using C = typename LatticeCompute<T, kBits>::Type;
  const auto scale = lattice_scale<T, kBits>(static_cast<typename Real<T>::Bits>(*peak), limit);
  const C inverse = scale.inverse;
  if (prefix && global_thread() == 0)
    *prefix = {static_cast<uint32_t>(kBits), ranks, 1, 0, static_cast<double>(scale.stored)};
  const StorageOf<D>* src = static_cast<const StorageOf<D>*>(from);
  constexpr uint64_t kWide = sizeof(StorageOf<D>) * kEach < 16 ? sizeof(StorageOf<D>) * kEach : 16;
  const uint64_t whole = aligned_to(src, kWide) ? n / kEach : 0;
  const bool nothing = inverse == C(0);  // all elements are zero, or not all finite
  Draws draws(seed);
  const uint64_t tiles = (whole + kTile - 1) / kTile;
  for (uint64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const uint64_t first = (tiles - 1 - t) * kTile + threadIdx.x;
    T values[kLoads][kEach];
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      const uint64_t at = first + static_cast<uint32_t>(l) * kThreads;
      if (at < whole) {
        load_pack<D, kEach>(src + at * kEach, values[l]);
      } else {
#pragma unroll
        for (int i = 0; i < kEach; ++i) values[l][i] = T(0);
      }
    }
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      const uint64_t at = first + static_cast<uint32_t>(l) * kThreads;
      Q out[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const T x = nothing ? T(0) : values[l][i];  // NaN is not rounded
        out[i] = rounded<C, T, Random>(x, inverse, limit, draws, at * kEach + static_cast<uint32_t>(i));
      }
      if (at < whole) store_integers(out, q + at * kEach);
    }
  }
  for (uint64_t i = whole * kEach + global_thread(); i < n; i += global_threads()) {
    const T x = nothing ? T(0) : loaded<D>(src[i]);
    q[i] = rounded<C, T, Random>(x, inverse, limit, draws, i);
  }
}

// Decode integers, as a tensor computed in T does, to elements of D.
template <typename T, DTypeCode D, bool Add>
HC_DEVICE void dequantize(const void* from, uint64_t n, uint64_t scale_bits, void* to,
                          const uint32_t* status) {
  if (*status) return;
  using C = typename LatticeCompute<T, kBits>::Type;
  const C scale = static_cast<C>(float_of(scale_bits));
  const Q* q = static_cast<const Q*>(from);
  StorageOf<D>* out = static_cast<StorageOf<D>*>(to);
  constexpr uint64_t kWide = sizeof(StorageOf<D>) * kEach < 16 ? sizeof(StorageOf<D>) * kEach : 16;
  const uint64_t whole = aligned_to(out, kWide) && aligned_to(q, alignof(Integers)) ? n / kEach : 0;
  for (uint64_t tile = blockIdx.x; tile * kTile < whole; tile += gridDim.x) {
    const uint64_t first = tile * kTile + threadIdx.x;
    Q integers[kLoads][kEach];
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      const uint64_t at = first + static_cast<uint32_t>(l) * kThreads;
      if (at < whole) load_integers(q + at * kEach, integers[l]);
    }
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      const uint64_t at = first + static_cast<uint32_t>(l) * kThreads;
      if (at >= whole) continue;
      T values[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) values[i] = lattice_value<T, kBits>(integers[l][i], scale);
      put_pack<D, Add, kEach>(out + at * kEach, values);
    }
  }
  for (uint64_t i = whole * kEach + global_thread(); i < n; i += global_threads())
    put<D, Add>(out + i, lattice_value<T, kBits>(q[i], scale));
}

}  // namespace
}  // namespace hybridcomp

// `prefix` is null for integers without a message; `q` and `prefix` are aligned to 8 bytes.
#define HC_QUANTIZE_AS(name, D, random)                                                                     \
  HC_KERNEL(hybridcomp::kThreads)                                                                           \
  name(const void* src, std::uint64_t n, const std::uint64_t* peak, std::int32_t limit, std::uint64_t seed, \
       std::uint32_t ranks, void* prefix, void* q) {                                                        \
    hybridcomp::quantize<D, random>(src, n, peak, limit, seed, ranks,                                       \
                                    static_cast<hybridcomp::Prefix*>(prefix),                               \
                                    static_cast<hybridcomp::Q*>(q));                                        \
  }
#define HC_QUANTIZE(name, D)               \
  HC_QUANTIZE_AS(name##_nearest, D, false) \
  HC_QUANTIZE_AS(name##_stochastic, D, true)
HC_EACH_INPUT(HC_QUANTIZE, lattice_quantize)

#define HC_DEQUANTIZE(name, T, D, Add)                                                                \
  HC_KERNEL(hybridcomp::kThreads)                                                                     \
  name(const void* q, std::uint64_t n, std::uint64_t scale, void* out, const std::uint32_t* status) { \
    hybridcomp::dequantize<T, D, Add>(q, n, scale, out, status);                                      \
  }
HC_EACH_OUTPUT(HC_DEQUANTIZE, lattice_dequantize)
