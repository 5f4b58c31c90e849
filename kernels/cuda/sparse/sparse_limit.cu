// Limit of `threshold`: a magnitude, or a multiple of the root mean square, which is summed in the order that
// hybridcomp/sparse.hpp fixes.
#include "sparse/sparse.cuh"

namespace hybridcomp {
namespace {

constexpr uint32_t kChunk = 2048;              // elements of an index block squared at a time
constexpr int kSquareThreads = 32 + kThreads;  // the first warp adds

// Sum the squares of each index block: the threads after the first warp square a chunk while 16 lanes of the
// first add up the previous one. The last block adds the blocks' sums, in turn, and sets the limit's key.
template <DTypeCode D>
HC_DEVICE void mean_square(Grid grid, const StorageOf<D>* src, uint64_t n, double* blocks, void* search,
                           uint64_t limit) {
  HC_SHARED(double, squares, 2 * kChunk);
  HC_SHARED(double, lanes, kLanes);
  HC_SHARED(uint32_t, shared, 1);
  Search* const s = static_cast<Search*>(search);
  const uint64_t number = blocks_of(n);
  uint32_t others = 0;
  for (uint64_t block = grid.block; block < number; block += grid.blocks) {
    const StorageOf<D>* const from = src + block * kIndexBlock;
    const uint32_t m = block_elements(block, n), chunks = (m + kChunk - 1) / kChunk;
    double sum = 0;
    for (uint32_t c = 0; c <= chunks; ++c) {
      if (threadIdx.x >= 32) {
        const uint32_t thread = threadIdx.x - 32;
        double* const to = squares + (c & 1) * kChunk;
        if (c < chunks) {
          StorageOf<D> x[kChunk / kThreads];
#pragma unroll
          for (uint32_t j = 0; j < kChunk / kThreads; ++j) {
            const uint32_t i = c * kChunk + j * kThreads + thread;
            x[j] = i < m ? from[i] : StorageOf<D>(0);
          }
#pragma unroll
          for (uint32_t j = 0; j < kChunk / kThreads; ++j) {
            const double value = summand(finite_key<D>(x[j], &others));
            to[j * kThreads + thread] = value * value;
          }
        }
      } else if (c && threadIdx.x < kLanes) {
        const double* const values = squares + (~c & 1) * kChunk + threadIdx.x;
#pragma unroll 16
        for (uint32_t i = 0; i < kChunk / kLanes; ++i) sum += values[i * kLanes];
      }
      __syncthreads();
    }
    if (threadIdx.x < kLanes) lanes[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) blocks[block] = sum_of_lanes(lanes);
  }
  add_others(others, s);
  if (!last_to_arrive(grid, s, shared)) return;
  double total = 0;
  for (uint64_t start = 0; start < number; start += kChunk) {
    const uint64_t left = number - start;
    const uint32_t part = left < kChunk ? static_cast<uint32_t>(left) : kChunk;
    for (uint32_t i = threadIdx.x; i < part; i += kSquareThreads) squares[i] = __ldcg(blocks + start + i);
    __syncthreads();
    if (threadIdx.x == 0)
      for (uint32_t i = 0; i < part; ++i) total += squares[i];
    __syncthreads();
  }
  if (threadIdx.x >= 32) return;
  const uint64_t finite = n - seen64(&s->others);
  const double mean = finite ? square_root(total / static_cast<double>(finite)) : 0.0;
  const uint64_t key = least_key_of_warp(__shfl_sync(kFullWarp, float_of(limit) * mean, 0), D);
  if (threadIdx.x) return;
  s->low = key;
  decide(s, key);
}

HC_DEVICE void set_limit(Grid, void* search, uint64_t limit, uint32_t dtype) {
  Search* const s = static_cast<Search*>(search);
  const uint64_t key = least_key_of_warp(float_of(limit), static_cast<DTypeCode>(dtype));
  if (threadIdx.x) return;
  s->low = key;
  decide(s, key);
}

}  // namespace

// Set the limit of `threshold:abs`. One warp.
HC_KERNEL(32) sparse_limit(void* search, uint64_t limit, uint32_t dtype) {
  set_limit(whole_grid(), search, limit, dtype);
}
HC_TABLE_FORM(32, sparse_limit, set_limit)

}  // namespace hybridcomp

// Set the limit of `threshold:rel`. `limit` is a double's bits: a multiple of the root mean square.
#define HC_MEAN_SQUARE(name, D)                                                            \
  HC_KERNEL(hybridcomp::kSquareThreads)                                                    \
  name(const hybridcomp::StorageOf<D>* src, std::uint64_t n, double* blocks, void* search, \
       std::uint64_t limit) {                                                              \
    hybridcomp::mean_square<D>(hybridcomp::whole_grid(), src, n, blocks, search, limit);   \
  }                                                                                        \
  HC_TABLE_FORM(hybridcomp::kSquareThreads, name, hybridcomp::mean_square<D>)
HC_EACH_INPUT(HC_MEAN_SQUARE, sparse_mean_square)
