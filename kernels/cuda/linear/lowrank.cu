// PowerSGD's steps between the matrix products, which a library does: the random start, orthonormal columns,
// and P Q^T, whose sums run in the CPU's order, so that all ranks get the same bits.
#include "common/elements.cuh"

namespace hybridcomp {
namespace {

constexpr int kThreads = 256;
constexpr int kGramThreads = 512;
constexpr int kGramWarps = kGramThreads / 32;
constexpr int kMostRank = 4096;
constexpr double kDependent = 1e-12;  // squared share left of a vector below which it is rounding noise
constexpr int kRows = 16;             // rows of a thread's column of P Q^T
constexpr int kDepth = 16;            // columns of P that a block holds at a time
constexpr int kNarrow = 32;           // least columns of a tile

// Return x with one NaN for all: arithmetic's NaN has other bits on other machines.
HC_DEVICE float canonical(float x) { return x != x ? float_of(Real<float>::kNan) : x; }

HC_DEVICE uint64_t splitmix64(uint64_t state) {
  uint64_t z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

HC_DEVICE double warp_sum(double x) {
  for (int distance = 16; distance; distance /= 2) x += __shfl_xor_sync(kFullWarp, x, distance);
  return x;
}

// Return this lane's share of a . b over begin .. end.
HC_DEVICE double dot_share(const float* a, const float* b, uint64_t begin, uint64_t end) {
  double sum = 0;
#pragma unroll 4
  for (uint64_t i = begin + (threadIdx.x & 31u); i < end; i += 32)
    sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

// Compute along[l] = x . v[l] for `count` vectors, by the block; `along` is shared memory, for all threads to
// read. If there are fewer vectors than warps, they are cut so that every warp has work, and `parts` are
// added in their order.
HC_DEVICE void dots(const float* x, const float* v, uint64_t rows, uint32_t count, double* parts,
                    double* along) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x & 31u;
  const uint32_t cuts = count < kGramWarps ? kGramWarps / count : 1;
  const uint64_t each = (rows + cuts - 1) / cuts;
  double* const to = cuts > 1 ? parts : along;
  for (uint32_t task = warp; task < count * cuts; task += kGramWarps) {
    const uint64_t begin = task % cuts * each;
    const uint64_t end = begin + each < rows ? begin + each : rows;
    const double sum = warp_sum(dot_share(x, v + task / cuts * rows, begin, end));
    if (lane == 0) to[task] = sum;
  }
  __syncthreads();
  if (cuts > 1 && threadIdx.x < count) {
    double sum = 0;
    for (uint32_t cut = 0; cut < cuts; ++cut) sum += parts[threadIdx.x * cuts + cut];
    along[threadIdx.x] = sum;
  }
  __syncthreads();
}

template <DTypeCode D, bool Add>
HC_DEVICE void reconstruct(const float* p, const float* q, void* to, uint64_t n, uint64_t rows, uint64_t cols,
                           uint64_t rank, uint32_t width, const uint32_t* status) {
  HC_SHARED(float, left, kThreads / kNarrow * kRows * kDepth);
  if (*status) return;
  StorageOf<D>* out = static_cast<StorageOf<D>*>(to);
  const uint32_t groups = kThreads / width, group = threadIdx.x / width, column = threadIdx.x % width;
  const uint32_t tall = groups * kRows;  // rows of a tile
  const uint64_t across = (cols + width - 1) / width, tiles = (rows + tall - 1) / tall * across;
  for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const uint64_t i0 = tile / across * tall, j = tile % across * width + column;
    float sums[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = 0;
    for (uint64_t k0 = 0; k0 < rank; k0 += kDepth) {
      const uint32_t depth = static_cast<uint32_t>(rank - k0 < kDepth ? rank - k0 : kDepth);
      __syncthreads();
      for (uint32_t e = threadIdx.x; e < tall * kDepth; e += kThreads) {
        const uint64_t i = i0 + e / kDepth;
        const uint32_t k = e % kDepth;
        left[e] = i < rows && k < depth ? p[i * rank + k0 + k] : 0.0f;
      }
      __syncthreads();
      if (j >= cols) continue;
      const float* right = q + j * rank + k0;
      const float* mine = left + group * kRows * kDepth;
      for (uint32_t k = 0; k < depth; ++k) {
        const float y = right[k];
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums[r] += y * mine[r * kDepth + k];
      }
    }
    const uint64_t first = (i0 + group * kRows) * cols + j;
    if (j < cols) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint64_t at = first + static_cast<uint32_t>(r) * cols;
        if (at < n) put<D, Add>(out + at, sums[r]);
      }
    }
  }
}

}  // namespace

// Write the start Q: each element is the sum of four uniform 16-bit numbers, less their mean, over their
// deviation.
HC_KERNEL(kThreads) lowrank_initial(float* q, uint64_t n, uint64_t start, uint64_t deviation) {
  for (uint64_t i = global_thread(); i < n; i += global_threads()) {
    const uint64_t bits = splitmix64(start + (i + 1) * 0x9E3779B97F4A7C15ull);
    const uint64_t sum =
        (bits & 0xFFFFu) + ((bits >> 16) & 0xFFFFu) + ((bits >> 32) & 0xFFFFu) + (bits >> 48);
    q[i] = static_cast<float>((static_cast<double>(sum) - 131070.0) / float_of(deviation));
  }
}

// Transpose `from`, rows x cols, to `to`, cols x rows.
HC_KERNEL(kThreads) lowrank_transpose(const float* from, float* to, uint64_t rows, uint64_t cols) {
  for (uint64_t i = global_thread(); i < rows * cols; i += global_threads())
    to[i] = canonical(from[i % rows * cols + i / rows]);
}

HC_KERNEL(kThreads) lowrank_canonical(float* values, uint64_t n) {
  for (uint64_t i = global_thread(); i < n; i += global_threads()) values[i] = canonical(values[i]);
}

HC_KERNEL(32) lowrank_prefix(uint64_t* payload, uint64_t rows, uint64_t cols, uint64_t rank) {
  if (global_thread() == 0) {
    payload[0] = rows;
    payload[1] = cols;
    payload[2] = rank;
  }
}

// Orthonormalize `rank` vectors of `rows` elements, one after another: v is [rank][rows]. Gram-Schmidt, each
// vector twice, sums in double; a vector that depends on those before it becomes zero, and non-finite values
// spread to those after it. Runs as one block, since each vector needs those before it.
HC_KERNEL(kGramThreads) lowrank_orthogonalize(float* v, uint64_t rows, uint32_t rank) {
  HC_SHARED(double, parts, kGramWarps);
  HC_SHARED(double, along, kMostRank);
  for (uint32_t k = 0; k < rank; ++k) {
    float* x = v + k * rows;
    dots(x, x, rows, 1, parts, along);
    const double before = along[0];
    __syncthreads();  // before `along` is written again
    for (int pass = 0; k && pass < 2; ++pass) {
      dots(x, v, rows, k, parts, along);
      for (uint64_t i = threadIdx.x; i < rows; i += kGramThreads) {
        double left = static_cast<double>(x[i]);
        for (uint32_t l = 0; l < k; ++l) left -= along[l] * static_cast<double>(v[l * rows + i]);
        x[i] = static_cast<float>(left);
      }
      __syncthreads();
    }
    dots(x, x, rows, 1, parts, along);
    const double after = along[0];
    __syncthreads();
    const bool none = after <= before * kDependent, spoilt = !(after < float_of(Real<double>::kInfinity));
    const double norm = none || spoilt ? 1.0 : sqrt(after);
    for (uint64_t i = threadIdx.x; i < rows; i += kGramThreads) {
      const float unit = static_cast<float>(static_cast<double>(x[i]) / norm);
      x[i] = none ? 0.0f : spoilt ? float_of(Real<float>::kNan) : unit;
    }
    __syncthreads();
  }
}

}  // namespace hybridcomp

// Reconstruct in tiles of `width` columns: 32, 64, 128 or 256.
#define HC_RECONSTRUCT(name, D, Add)                                                                       \
  HC_KERNEL(hybridcomp::kThreads)                                                                          \
  name(const float* p, const float* q, void* out, std::uint64_t n, std::uint64_t rows, std::uint64_t cols, \
       std::uint64_t rank, std::uint32_t width, const std::uint32_t* status) {                             \
    hybridcomp::reconstruct<D, Add>(p, q, out, n, rows, cols, rank, width, status);                        \
  }
HC_RECONSTRUCT(lowrank_reconstruct_f32, hybridcomp::kFloat32, false)
HC_RECONSTRUCT(lowrank_reconstruct_f64, hybridcomp::kFloat64, false)
HC_RECONSTRUCT(lowrank_reconstruct_f16, hybridcomp::kFloat16, false)
HC_RECONSTRUCT(lowrank_reconstruct_bf16, hybridcomp::kBFloat16, false)
HC_RECONSTRUCT(lowrank_reconstruct_f32_add, hybridcomp::kFloat32, true)
HC_RECONSTRUCT(lowrank_reconstruct_f64_add, hybridcomp::kFloat64, true)
