// Means of ranks' sums; the codecs' decoders add up the sums.
#include "common/elements.cuh"
#include "common/table.cuh"

namespace hybridcomp {
namespace {

constexpr int kThreads = 256;

// Divide by IEEE division, rounded once, as the CPU does.
template <typename T, typename Pack>
HC_DEVICE void divide(Grid grid, T* acc, uint64_t n, T by) {
  constexpr uint64_t kEach = sizeof(Pack) / sizeof(T);
  const uint64_t whole = aligned_to(acc, 16) ? n / kEach : 0;
  for (uint64_t i = grid.thread(); i < whole; i += grid.threads()) {
    Pack pack = reinterpret_cast<const Pack*>(acc)[i];
    T* values = reinterpret_cast<T*>(&pack);
    for (uint64_t k = 0; k < kEach; ++k) values[k] = values[k] / by;
    reinterpret_cast<Pack*>(acc)[i] = pack;
  }
  for (uint64_t i = whole * kEach + grid.thread(); i < n; i += grid.threads()) acc[i] = acc[i] / by;
}

// The divisor is given as its bits.
HC_DEVICE void divide_floats(Grid grid, float* acc, uint64_t n, uint32_t by) {
  divide<float, float4>(grid, acc, n, float_of(by));
}
HC_DEVICE void divide_doubles(Grid grid, double* acc, uint64_t n, uint64_t by) {
  divide<double, double2>(grid, acc, n, float_of(by));
}

}  // namespace

// Compute acc[i] /= by; `by` is given as its bits.
HC_KERNEL(kThreads) divide_f32(float* acc, uint64_t n, uint32_t by) {
  divide_floats(whole_grid(), acc, n, by);
}
HC_TABLE_FORM(kThreads, divide_f32, divide_floats)

HC_KERNEL(kThreads) divide_f64(double* acc, uint64_t n, uint64_t by) {
  divide_doubles(whole_grid(), acc, n, by);
}
HC_TABLE_FORM(kThreads, divide_f64, divide_doubles)

}  // namespace hybridcomp
