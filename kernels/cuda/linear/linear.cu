// Kernels that the linear codecs share: largest magnitudes, constants, and error feedback; and those of
// `randomblock`, whose block other kernels copy.
#include "common/elements.cuh"

namespace hybridcomp {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 4;   // elements of a load
constexpr int kLoads = 4;  // loads in flight

HC_DEVICE void raise_to(uint64_t* word, uint64_t value) {
  if (value) atomicMax(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
}

// Raise *most to the largest magnitude of n elements, as bits of the computing type.
template <DTypeCode D>
HC_DEVICE void peak(const void* from, uint64_t n, uint64_t* most) {
  using T = ComputeOf<D>;
  using Bits = typename Real<T>::Bits;
  HC_SHARED(Bits, peaks, kThreads / 32);
  const StorageOf<D>* src = static_cast<const StorageOf<D>*>(from);
  constexpr uint64_t kWide = sizeof(StorageOf<D>) * kEach < 16 ? sizeof(StorageOf<D>) * kEach : 16;
  const uint64_t whole = aligned_to(src, kWide) ? n / kEach : 0;
  Bits found = 0;
  for (uint64_t tile = blockIdx.x; tile * (kThreads * kLoads) < whole; tile += gridDim.x) {
    T values[kLoads][kEach];
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      const uint64_t at = tile * (kThreads * kLoads) + static_cast<uint32_t>(l) * kThreads + threadIdx.x;
      if (at < whole) {
        load_pack<D, kEach>(src + at * kEach, values[l]);
      } else {
#pragma unroll
        for (int i = 0; i < kEach; ++i) values[l][i] = T(0);
      }
    }
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const Bits a = magnitude(values[l][i]);
        found = a > found ? a : found;
      }
    }
  }
  for (uint64_t i = whole * kEach + global_thread(); i < n; i += global_threads()) {
    const Bits a = magnitude(loaded<D>(src[i]));
    found = a > found ? a : found;
  }
  for (int distance = 16; distance; distance /= 2) {
    const Bits other = __shfl_xor_sync(kFullWarp, found, distance);
    found = other > found ? other : found;
  }
  if ((threadIdx.x & 31u) == 0) peaks[threadIdx.x / 32] = found;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) found = peaks[w] > found ? peaks[w] : found;
    raise_to(most, found);
  }
}

template <typename U>
HC_DEVICE void fill(void* to, uint64_t n, uint64_t bits, const uint32_t* status) {
  if (*status) return;
  U* out = static_cast<U*>(to);
  const U value = static_cast<U>(bits);
  constexpr uint64_t kIn16 = 16 / sizeof(U);
  uint64_t before =
      (0 - reinterpret_cast<uint64_t>(to)) % 16 / sizeof(U);  // up to an address for wide stores
  before = before < n ? before : n;
  const uint64_t whole = (n - before) / kIn16;
  Pack<U, static_cast<int>(kIn16)> pack;
#pragma unroll
  for (int i = 0; i < static_cast<int>(kIn16); ++i) pack.of[i] = value;
  Pack<U, static_cast<int>(kIn16)>* wide = reinterpret_cast<Pack<U, static_cast<int>(kIn16)>*>(out + before);
  for (uint64_t i = global_thread(); i < whole; i += global_threads()) wide[i] = pack;
  for (uint64_t i = global_thread(); i < before; i += global_threads()) out[i] = value;
  for (uint64_t i = before + whole * kIn16 + global_thread(); i < n; i += global_threads()) out[i] = value;
}

template <typename T>
HC_DEVICE void multiply(T* values, uint64_t n, uint64_t factor) {
  const T by = static_cast<T>(float_of(factor));
  for (uint64_t i = global_thread(); i < n; i += global_threads()) values[i] *= by;
}

// Raise *most to the largest magnitude of given - own, which tells whether error feedback may keep it.
template <typename T>
HC_DEVICE void lost_peak(const T* given, const T* own, uint64_t n, uint64_t* most) {
  typename Real<T>::Bits found = 0;
  for (uint64_t i = global_thread(); i < n; i += global_threads()) {
    const typename Real<T>::Bits a = magnitude(given[i] - own[i]);
    found = a > found ? a : found;
  }
  if (found >= Real<T>::kInfinity) raise_to(most, found);
}

template <typename T>
HC_DEVICE void keep_lost(const T* given, const T* own, uint64_t n, const uint64_t* most, T* residual) {
  if (*most) return;
  for (uint64_t i = global_thread(); i < n; i += global_threads()) residual[i] = given[i] - own[i];
}

}  // namespace

HC_KERNEL(kThreads) fill_16(void* out, uint64_t n, uint64_t bits, const uint32_t* status) {
  fill<uint16_t>(out, n, bits, status);
}
HC_KERNEL(kThreads) fill_32(void* out, uint64_t n, uint64_t bits, const uint32_t* status) {
  fill<uint32_t>(out, n, bits, status);
}
HC_KERNEL(kThreads) fill_64(void* out, uint64_t n, uint64_t bits, const uint32_t* status) {
  fill<uint64_t>(out, n, bits, status);
}

// Write the 24 bytes of randomblock's prefix; `most` is the peak of the elements that are not sent.
HC_KERNEL(32)
randomblock_prefix(uint64_t* payload, uint64_t start, uint64_t ratio, const uint64_t* most,
                   uint64_t infinity) {
  if (global_thread() == 0) {
    payload[0] = start;
    payload[1] = ratio;
    payload[2] = *most >= infinity;
  }
}

// Write the mark that follows a block that ranks sum: NaN if an element that is not sent is not finite, else
// zero.
HC_KERNEL(32) randomblock_mark_f32(float* mark, const uint64_t* most) {
  if (global_thread() == 0) *mark = *most >= Real<float>::kInfinity ? float_of(Real<float>::kNan) : 0.0f;
}
HC_KERNEL(32) randomblock_mark_f64(double* mark, const uint64_t* most) {
  if (global_thread() == 0) *mark = *most >= Real<double>::kInfinity ? float_of(Real<double>::kNan) : 0.0;
}

}  // namespace hybridcomp

#define HC_PEAK(name, D)          \
  HC_KERNEL(hybridcomp::kThreads) \
  name(const void* src, std::uint64_t n, std::uint64_t* most) { hybridcomp::peak<D>(src, n, most); }
HC_EACH_INPUT(HC_PEAK, peak)

#define HC_FEEDBACK(s, T)                                                                            \
  HC_KERNEL(hybridcomp::kThreads) multiply_##s(T* values, std::uint64_t n, std::uint64_t factor) {   \
    hybridcomp::multiply<T>(values, n, factor);                                                      \
  }                                                                                                  \
  HC_KERNEL(hybridcomp::kThreads)                                                                    \
  lost_peak_##s(const T* given, const T* own, std::uint64_t n, std::uint64_t* most) {                \
    hybridcomp::lost_peak<T>(given, own, n, most);                                                   \
  }                                                                                                  \
  HC_KERNEL(hybridcomp::kThreads)                                                                    \
  keep_lost_##s(const T* given, const T* own, std::uint64_t n, const std::uint64_t* most, T* kept) { \
    hybridcomp::keep_lost<T>(given, own, n, most, kept);                                             \
  }
HC_FEEDBACK(f32, float)
HC_FEEDBACK(f64, double)
