// SIDCo's limit: fits on a sample, as kernels/codecs/sparse/sidco.cpp makes them, corrected by counting the
// candidates. Sums are in the order that hybridcomp/sparse.hpp fixes.
#include "sparse/sparse.cuh"

namespace hybridcomp {
namespace {

constexpr uint32_t kFitThreads = kLanes * 32;  // a warp for each lane of a sum
constexpr double kFirstShare = 0.25;           // as kernels/codecs/sparse/sidco.cpp

// -- the sample --------------------------------------------------------------------------------------------

// Write the sample's keys by lanes, `stride` of each, zero where an element is not finite and after the last
// one.
template <DTypeCode D>
HC_DEVICE void sample(Grid grid, const StorageOf<D>* src, uint64_t n, uint64_t groups, uint64_t stride,
                      void* to, void* search) {
  auto* const keys = static_cast<typename Real<ComputeOf<D>>::Bits*>(to);
  const uint64_t size = groups ? groups * kGroupOfSample : n;
  uint32_t others = 0;
  for (uint64_t i = grid.thread(); i < stride * kLanes; i += grid.threads()) {
    typename Real<ComputeOf<D>>::Bits key = 0;
    if (i < size) {
      const uint64_t at = groups ? group_start(i / kGroupOfSample, groups, n) + i % kGroupOfSample : i;
      key = finite_key<D>(src[at], &others);
    }
    keys[i % kLanes * stride + i / kLanes] = key;
  }
  __syncwarp();
  add_others(others, static_cast<Search*>(search));
}

// -- the fits ----------------------------------------------------------

// Survivors of the last limit in a warp's part of the sample, one lane of the sums, in their order: a stage
// adds up no more than the one before left.
template <typename U>
struct Survivors {
  U* list;
  U* next;  // survivors of the limit measured last
  uint32_t length, left;
  double* sums;  // shared memory, kLanes of each; then the whole sample's size
  double* squares;
  uint32_t* counts;
  Distribution distribution;
};
template <typename U>
constexpr uint32_t kLoads = 64 / sizeof(U);  // loads of a sum that are in flight together
template <typename U>
constexpr DTypeCode kKind = sizeof(U) == 8 ? kFloat64 : kFloat32;

template <typename U, typename F>
HC_DEVICE double sum_of(const U* keys, uint32_t n, F term) {
  double sum = 0;
  uint32_t i = 0;
  for (; i + kLoads<U> <= n; i += kLoads<U>) {
    U x[kLoads<U>];
#pragma unroll
    for (uint32_t j = 0; j < kLoads<U>; ++j) x[j] = keys[i + j];
#pragma unroll
    for (uint32_t j = 0; j < kLoads<U>; ++j) sum += term(summand(x[j]));
  }
#pragma unroll 1
  for (; i < n; ++i) sum += term(summand(keys[i]));
  return sum;
}

// Count the survivors that reach `key`, and sum them: in all threads.
template <typename U>
HC_DEVICE Tail measure(Survivors<U>* own, uint64_t key) {
  const U limit = static_cast<U>(key);
  const U* summed = own->list;
  own->left = own->length;
  if (key) {
    summed = own->next;
    own->left = 0;
#pragma unroll 1
    for (uint32_t start = 0; start < own->length; start += 32) {
      const uint32_t i = start + lane_of();
      const U x = i < own->length ? own->list[i] : 0;
      const uint32_t reach = __ballot_sync(kFullWarp, x >= limit);
      if (x >= limit) own->next[own->left + static_cast<uint32_t>(__popc(reach & below_lane()))] = x;
      own->left += static_cast<uint32_t>(__popc(reach));
    }
    __syncwarp();
  }
  if (lane_of() == 0) {
    own->sums[warp_of()] = sum_of(summed, own->left, [](double x) { return x; });
    own->squares[warp_of()] =
        own->distribution == kPareto ? sum_of(summed, own->left, [](double x) { return x * x; }) : 0.0;
    own->counts[warp_of()] = own->left;
  }
  __syncthreads();
  Tail tail{key_value(key, key_format(kKind<U>)), 0, sum_of_lanes(own->sums), sum_of_lanes(own->squares)};
  uint64_t count = 0;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) count += own->counts[lane];
  // Lists have zeros after the sample's end, which count as survivors if the key is zero.
  tail.count = key ? static_cast<double>(count) : own->sums[kLanes];
  __syncthreads();
  return tail;
}

// Go on with the survivors of the limit measured last.
template <typename U>
HC_DEVICE void keep(Survivors<U>* own, uint64_t key) {
  if (!key) return;
  U* const list = own->list;
  own->list = own->next;
  own->next = list;
  own->length = own->left;
}

HC_DEVICE uint64_t next_key(uint64_t fitted, uint64_t low, uint64_t high, int stage) {
  if (high == kNoKey) return fitted < low + 1 ? low + 1 : fitted;
  if (stage >= kMostStages / 2) fitted = low + (high - low) / 2;
  const uint64_t least = fitted < low + 1 ? low + 1 : fitted;
  return high - 1 < least ? high - 1 : least;
}

// Limit, and the mean by which the elements that reach it exceed it.
struct Start {
  double limit, excess;
};

template <typename U>
HC_DEVICE Start adapted(Survivors<U>* own, double finite, double target) {
  const double want = wide_goal(target < 0.0 ? 0.0 : target);
  uint64_t low_key = 0, high_key = kNoKey;
  Tail low = measure(own, 0), high{};
  low.count = finite;
#pragma unroll 1
  for (int stage = 0; stage < kMostStages && low.count > want * (1 + kNear); ++stage) {
    const bool bracket = high_key != kNoKey;
    const double quarter = low.count * kFirstShare;
    const double goal = bracket || !(want < quarter) ? want : quarter;
    double limit = fitted_limit(low, goal, own->distribution);
    if (bracket && !(limit < high.limit)) limit = limit_between(low, high, goal);
    const uint64_t key = next_key(least_key_of_warp(limit, kKind<U>), low_key, high_key, stage);
    if (key <= low_key) break;
    const Tail next = measure(own, key);
    if (next.count >= want * (1 - kNear)) {
      keep(own, key);
      low = next;
      low_key = key;
    } else {
      high = next;
      high_key = key;
    }
  }
  return {low.limit, low.count > 0 ? low.sum / low.count - low.limit : 0.0};
}

template <typename U>
HC_DEVICE double fixed(Survivors<U>* own, double finite, double target, int stages) {
  if (target < 0.5) return float_of(Real<double>::kInfinity);
  const double all = target / finite, share = all < 1.0 ? all : 1.0;
  const double first = stages > 1 && share < kFirstShare ? kFirstShare : share;
  Tail tail = measure(own, 0);
  tail.count = finite;
  double limit = fitted_limit(tail, finite * first, own->distribution);
  const double step = natural_log(first / share) / (stages > 1 ? stages - 1 : 1);
#pragma unroll 1
  for (int stage = 1; stage < stages && first > share; ++stage) {
    const uint64_t key = least_key_of_warp(limit, kKind<U>);
    tail = measure(own, key);
    keep(own, key);  // limits only grow
    if (tail.count < 0.5) break;
    limit += tail_distance(tail, limit, step, own->distribution);
  }
  return limit;
}

// Fit the limit. `keys` has room for two samples, of which it holds the first.
template <typename U>
HC_DEVICE void fit(Grid, U* keys, uint64_t n, uint64_t k, uint64_t size, uint64_t stride, uint32_t stages,
                   uint32_t distribution, uint32_t dtype, void* search) {
  HC_SHARED(double, sums, kLanes + 1);
  HC_SHARED(double, squares, kLanes);
  HC_SHARED(uint32_t, counts, kLanes);
  Search* const s = static_cast<Search*>(search);
  const uint64_t others = s->others;
  const double target = static_cast<double>(k) * (static_cast<double>(size) / static_cast<double>(n)) -
                        static_cast<double>(others);
  const double finite = static_cast<double>(size - others);
  const uint64_t lane = warp_of();
  if (threadIdx.x == 0) sums[kLanes] = static_cast<double>(size);  // read after a barrier
  U* const list = keys + lane * stride;
  Survivors<U> own{list,
                   list + kLanes * stride,
                   static_cast<uint32_t>(stride),
                   0,
                   sums,
                   squares,
                   counts,
                   static_cast<Distribution>(distribution)};
  Start start{0, 0};
  if (stages)
    start.limit = fixed(&own, finite, target, static_cast<int>(stages));
  else
    start = adapted(&own, finite, target);
  const uint64_t key = least_key_of_warp(start.limit, static_cast<DTypeCode>(dtype));
  if (threadIdx.x) return;
  s->low = key < 1 ? 1 : key;  // zeros are never sent
  s->excess = bits_of(start.excess);
}

// -- counting the candidates
// -----------------------------------------------------------------------------------

// Numbers of elements that SIDCo may send.
struct Goal {
  uint64_t k, least, most;
  DTypeCode dtype;
};
HC_DEVICE uint64_t top_of(DTypeCode dtype) {
  return uint64_t(1) << (dtype == kFloat64 ? 63 : dtype == kFloat32 ? 31 : 15);
}

HC_DEVICE void search_among(Search* s, uint64_t from, uint64_t to, uint64_t need) {
  s->from = from;
  s->to = to;
  s->need = need;
  s->phase = kSearching;
}

// Find the key to count next, or decide which elements are sent. By a whole warp.
HC_DEVICE void refine_next(Search* s, const Goal& g) {
  const uint64_t low_key = s->low_key, high_key = s->high_key;
  const KeyFormat format = key_format(g.dtype);
  const Tail low{key_value(low_key, format), static_cast<double>(s->low_count), 0};
  const Tail high{key_value(high_key, format), static_cast<double>(s->high_count), 0};
  const double goal = static_cast<double>(g.k), excess = float_of(s->excess);
  const int stage = static_cast<int>(s->stage);
  const bool bracket = high_key != kNoKey;
  uint64_t key = 0;
  if (stage < kMostStages && low.count > goal * (1 + kNear)) {
    const double limit =
        bracket ? limit_between(low, high, goal) : low.limit + excess * natural_log(low.count / goal);
    key = next_key(least_key_of_warp(limit, g.dtype), low_key, high_key, stage);
  }
  __syncwarp();
  if (lane_of()) return;
  if (key > low_key) {
    s->next = key;
    s->phase = kRefining;
  } else if (s->low_count <= g.most) {
    decide(s, low_key);
  } else if (bracket && s->high_count >= g.least) {
    decide(s, high_key);
  } else {
    search_among(s, s->low, top_of(g.dtype), g.k);
  }
}

// Take the count of the key counted last: `reached` candidates reach it.
HC_DEVICE void refine_take(Search* s, const Goal& g, uint64_t reached) {
  const KeyFormat format = key_format(g.dtype);
  const double count = static_cast<double>(reached);
  if (count >= static_cast<double>(g.k) * (1 - kNear)) {
    if (s->high_key == kNoKey) {  // the next step goes on as this one did
      const double across = natural_log(static_cast<double>(s->low_count) / count);
      const double limit = key_value(s->low_key, format), excess = float_of(s->excess);
      s->excess = bits_of(across > 0 ? (key_value(s->next, format) - limit) / across : 2 * excess);
    }
    s->low_key = s->next;
    s->low_count = reached;
  } else {
    s->high_key = s->next;
    s->high_count = reached;
  }
  ++s->stage;
}

template <typename U>
HC_DEVICE void refine(Grid grid, const Tiles<U>& t, Search* s, const Goal& g) {
  using Key = typename KeyOf<U>::Type;
  HC_SHARED(uint32_t, shared, 1);
  HC_SHARED(uint32_t, sums, kWarps);
  do {
    if (s->phase != kRefining) return;
    const Key key = static_cast<Key>(s->next);
    uint32_t reached = 0;
    each_candidate(grid, t, false, key, static_cast<Key>(kTop<U> - key), [&](U) { ++reached; });
    __syncwarp();
    reached = warp_sum(reached);
    if (lane_of() == 0) sums[warp_of()] = reached;
    __syncthreads();
    uint64_t total = 0;
    for (uint32_t w = 0; w < kWarps; ++w) total += sums[w];
    const bool alone = grid.blocks == 1;
    if (!alone && threadIdx.x == 0) add64(&s->reached, total);
    if ((alone || last_to_arrive(grid, s, shared)) && threadIdx.x < 32) {
      if (threadIdx.x == 0) refine_take(s, g, alone ? total : take64(&s->reached));
      __syncwarp();
      refine_next(s, g);
    }
    __syncthreads();
  } while (grid.blocks == 1);
}

template <typename U>
HC_DEVICE void refine_stage(Grid grid, const U* src, uint64_t n, U* values, uint16_t* places, uint32_t room,
                            uint32_t* counts, void* search, uint64_t k, uint64_t least, uint64_t most,
                            uint32_t dtype) {
  refine<U>(grid, {src, n, values, places, room, counts}, static_cast<Search*>(search),
            {k, least, most, static_cast<DTypeCode>(dtype)});
}

HC_DEVICE void begin(Grid, void* search, uint64_t k, uint64_t least, uint64_t most, uint64_t stages,
                     uint32_t dtype) {
  Search* const s = static_cast<Search*>(search);
  const Goal goal{k, least, most, static_cast<DTypeCode>(dtype)};
  const uint64_t taken = s->taken, low = s->low;
  const bool refines = k && taken <= kMostTaken * most && taken >= least && !stages;
  __syncwarp();
  if (threadIdx.x == 0) {
    if (refines) {
      s->low_key = low;
      s->low_count = taken;
      s->high_key = kNoKey;
    } else if (!k) {
      decide(s, top_of(goal.dtype));
    } else if (taken >= least && taken <= most) {
      decide(s, low);
    } else if (taken >= k) {
      search_among(s, low, top_of(goal.dtype), k);
    } else {
      s->everywhere = 1;
      search_among(s, 0, low, k - taken);
    }
  }
  __syncwarp();
  if (refines) refine_next(s, goal);
}

}  // namespace

// Decide how SIDCo goes on with its candidates. One warp.
HC_KERNEL(32)
sparse_begin(void* search, uint64_t k, uint64_t least, uint64_t most, uint64_t stages, uint32_t dtype) {
  begin(whole_grid(), search, k, least, most, stages, dtype);
}
HC_TABLE_FORM(32, sparse_begin, begin)

}  // namespace hybridcomp

#define HC_FIT_SAMPLE(name, D)                                                                           \
  HC_KERNEL(hybridcomp::kThreads)                                                                        \
  name(const hybridcomp::StorageOf<D>* src, std::uint64_t n, std::uint64_t groups, std::uint64_t stride, \
       void* keys, void* search) {                                                                       \
    hybridcomp::sample<D>(hybridcomp::whole_grid(), src, n, groups, stride, keys, search);               \
  }                                                                                                      \
  HC_TABLE_FORM(hybridcomp::kThreads, name, hybridcomp::sample<D>)
HC_EACH_INPUT(HC_FIT_SAMPLE, sparse_fit_sample)

// One block.
#define HC_FIT(name, U)                                                                                 \
  HC_KERNEL(hybridcomp::kFitThreads)                                                                    \
  name(U* keys, std::uint64_t n, std::uint64_t k, std::uint64_t size, std::uint64_t stride,             \
       std::uint32_t stages, std::uint32_t distribution, std::uint32_t dtype, void* search) {           \
    hybridcomp::fit<U>(hybridcomp::whole_grid(), keys, n, k, size, stride, stages, distribution, dtype, \
                       search);                                                                         \
  }                                                                                                     \
  HC_TABLE_FORM(hybridcomp::kFitThreads, name, hybridcomp::fit<U>)
HC_FIT(sparse_fit_32, std::uint32_t)
HC_FIT(sparse_fit_64, std::uint64_t)

// Do a stage of the correction; a grid of one block does all stages.
#define HC_REFINE(bits, U)                                                                                  \
  HC_KERNEL(hybridcomp::kThreads)                                                                           \
  sparse_refine_##bits(const U* src, std::uint64_t n, U* values, std::uint16_t* places, std::uint32_t room, \
                       std::uint32_t* counts, void* search, std::uint64_t k, std::uint64_t least,           \
                       std::uint64_t most, std::uint32_t dtype) {                                           \
    hybridcomp::refine_stage<U>(hybridcomp::whole_grid(), src, n, values, places, room, counts, search, k,  \
                                least, most, dtype);                                                        \
  }                                                                                                         \
  HC_TABLE_FORM(hybridcomp::kThreads, sparse_refine_##bits, hybridcomp::refine_stage<U>)
HC_EACH_SIZE(HC_REFINE)
