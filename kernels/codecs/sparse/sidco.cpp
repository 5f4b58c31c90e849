// SIDCo's limit: stages of fits on a sample (hybridcomp/sparse.hpp), then one pass over the
// tensor.
#include <algorithm>

#include "codecs/sparse/fit.hpp"
#include "codecs/sparse/select.hpp"
#include "hybridcomp/sparse.hpp"

namespace hybridcomp {
namespace {

constexpr double kFirstShare = 0.25;  // least share of the elements that a stage keeps
constexpr std::uint64_t kNone = ~std::uint64_t(0);

// Limit, and the mean by which the elements that reach it exceed it.
struct Start {
  double limit;
  double excess;
};

// Return the key to look at next: that of a fitted limit, but between the two keys whose survivors are
// counted (`high` is kNone as long as all left too many), and halfway once fits have not found it. `low` if
// no key lies between.
std::uint64_t next_key(std::uint64_t fitted, std::uint64_t low, std::uint64_t high, int stage) {
  if (high == kNone) return std::max(fitted, low + 1);
  if (stage >= kMostStages / 2) fitted = low + (high - low) / 2;
  return std::min(std::max(fitted, low + 1), high - 1);
}

class Fit {
 public:
  Fit(const Kernels& kernels, const std::uint8_t* src, DTypeCode dtype, std::size_t n, std::size_t k,
      Distribution distribution, SampleSize sample)
      : kernels_(kernels), distribution_(distribution), wide_(dtype == kFloat64) {
    const std::uint64_t groups = sample_groups(n, k, sample);
    size_ = groups ? groups * kGroupOfSample : n;
    keys_.reserve(size_ * (wide_ ? 8 : 4));
    const std::size_t others = kernels.fit->sample(src, dtype, n, groups, keys_.data());
    finite_ = static_cast<double>(size_ - others);
    target_ = static_cast<double>(k) * (static_cast<double>(size_) / static_cast<double>(n)) -
              static_cast<double>(others);
  }

  // Run stages until about twice the target is left, so that the target surely is: as many as it takes. Every
  // stage starts from the survivors that the last one really left; after a stage that went too far, the next
  // limit lies between the two.
  Start adapted() {
    const double want = wide_goal(std::max(target_, 0.0));
    Point low = measure(0), high{kNone, {}};
    low.tail.count = finite_;
    for (int stage = 0; stage < kMostStages && low.tail.count > want * (1 + kNear); ++stage) {
      const bool bracket = high.key != kNone;
      const double goal = bracket ? want : std::max(want, low.tail.count * kFirstShare);
      double limit = fitted_limit(low.tail, goal, distribution_);
      if (bracket && !(limit < high.tail.limit)) limit = limit_between(low.tail, high.tail, goal);
      const std::uint64_t key = next_key(key_of(limit), low.key, high.key, stage);
      if (key <= low.key) break;
      const Point next = measure(key);
      (next.tail.count >= want * (1 - kNear) ? low : high) = next;
    }
    return {low.tail.limit, low.tail.count > 0 ? low.tail.sum / low.tail.count - low.tail.limit : 0.0};
  }

  // Run the paper's stages: the first keeps a quarter, the others an equal share each of the elements left.
  double fixed(int stages) {
    if (target_ < 0.5) return infinity();
    const double share = std::min(1.0, target_ / finite_);
    const double first = stages > 1 && share < kFirstShare ? kFirstShare : share;
    Point point = measure(0);
    point.tail.count = finite_;
    double limit = fitted_limit(point.tail, finite_ * first, distribution_);
    const double step = natural_log(first / share) / (stages > 1 ? stages - 1 : 1);
    for (int stage = 1; stage < stages && first > share; ++stage) {
      point = measure(key_of(limit));
      if (point.tail.count < 0.5) break;
      limit += tail_distance(point.tail, limit, step, distribution_);
    }
    return limit;
  }

 private:
  struct Point {
    std::uint64_t key;
    Tail tail;
  };

  double infinity() const { return float_of(Real<double>::kInfinity); }
  DTypeCode kind() const { return wide_ ? kFloat64 : kFloat32; }
  std::uint64_t key_of(double limit) const { return least_key(limit, kind()); }

  Point measure(std::uint64_t key) {
    Point point{key, {key_value(key, key_format(kind())), 0, 0}};
    point.tail.count =
        static_cast<double>(kernels_.fit->tail(keys_.data(), wide_, size_, key, &point.tail.sum));
    if (distribution_ == kPareto)
      point.tail.squares = kernels_.fit->tail_squares(keys_.data(), wide_, size_, key);
    return point;
  }

  const Kernels& kernels_;
  Distribution distribution_;
  bool wide_;
  std::size_t size_;
  Scratch keys_;
  double finite_, target_;
};

// Find a limit for the elements taken, which are too many: the key that k of them reach, within kNear; if
// there is none, one that `least` to `most` reach; else kNone. Only counts of elements decide: no order of
// sums matters.
std::uint64_t refined(const Kernels& kernels, const Selected& taken, std::uint64_t start, double excess,
                      std::size_t k, std::size_t least, std::size_t most) {
  const DTypeCode dtype = taken.dtype();
  const double goal = static_cast<double>(k);
  std::uint64_t low_key = start, high_key = kNone;
  Tail low{key_value(start, key_format(dtype)), static_cast<double>(taken.count()), 0}, high{};
  for (int stage = 0; stage < kMostStages && low.count > goal * (1 + kNear); ++stage) {
    const bool bracket = high_key != kNone;
    const double limit =
        bracket ? limit_between(low, high, goal) : low.limit + excess * natural_log(low.count / goal);
    const std::uint64_t key = next_key(least_key(limit, dtype), low_key, high_key, stage);
    if (key <= low_key) break;
    const Tail next{key_value(key, key_format(dtype)), static_cast<double>(taken.reaching(kernels, key)), 0};
    if (next.count >= goal * (1 - kNear)) {
      if (!bracket) {  // the next step goes on as this one did
        const double across = natural_log(low.count / next.count);
        excess = across > 0 ? (next.limit - low.limit) / across : 2 * excess;
      }
      low = next;
      low_key = key;
    } else {
      high = next;
      high_key = key;
    }
  }
  if (low.count <= static_cast<double>(most)) return low_key;
  return high_key != kNone && high.count >= static_cast<double>(least) ? high_key : kNone;
}

}  // namespace

Selected select_sidco(const Kernels& kernels, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                      std::size_t k, SidcoFit fits, int threads) {
  const int stages = fits.stages;
  if (!k) return select_largest(kernels, src, dtype, n, 0, false, threads);
  Fit fit(kernels, src, dtype, n, k, fits.distribution, stages ? kFixedSample : kAdaptedSample);
  const Start start = stages ? Start{fit.fixed(stages), 0.0} : fit.adapted();
  Selected selected(dtype, n);
  const std::size_t most = sidco_most(n, k), least = stages ? 0 : k - k / 5;
  const std::uint64_t key =
      std::max<std::uint64_t>(1, least_key(start.limit, dtype));  // zeros are never sent
  if (selected.collect(kernels, src, {key, 0, 0}, kMostTaken * most, threads) && selected.count() >= least) {
    std::uint64_t last = selected.count() <= most ? key : kNone;
    if (!stages) last = refined(kernels, selected, key, start.excess, k, least, most);
    if (last == kNone)
      selected.narrow(kernels, selected.largest(kernels, k, kNone));
    else if (last != key)
      selected.narrow(kernels, {last, 0, 0});
    return selected;
  }
  return select_largest(kernels, src, dtype, n, k, false, threads);
}

double sidco_limit(const Kernels& kernels, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                   std::size_t k, SidcoFit fits) {
  return Fit(kernels, src, dtype, n, k, fits.distribution, kFixedSample).fixed(fits.stages);
}

}  // namespace hybridcomp
