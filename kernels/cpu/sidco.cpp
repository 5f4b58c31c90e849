// SIDCo's limit: stages of exponential fits on a sample (hybridcomp/sparse.hpp), then one pass over the
// tensor.
#include <algorithm>

#include "fit.hpp"
#include "hybridcomp/sparse.hpp"
#include "select.hpp"

namespace hybridcomp {
namespace {

constexpr double kFirstShare = 0.25;  // the most that a stage drops is all but this

class Fit {
 public:
  Fit(const Kernels& kernels, const std::uint8_t* src, DTypeCode dtype, std::size_t n, std::size_t k)
      : kernels_(kernels), wide_(dtype == kFloat64) {
    const std::uint64_t groups = sample_groups(n, k);
    size_ = groups ? groups * kGroupOfSample : n;
    keys_.reserve(size_ * (wide_ ? 8 : 4));
    const std::size_t others = kernels.fit->sample(src, dtype, n, groups, keys_.data());
    finite_ = static_cast<double>(size_ - others);
    target_ = static_cast<double>(k) * (static_cast<double>(size_) / static_cast<double>(n)) -
              static_cast<double>(others);
  }

  // As many stages as it takes until the share that remains is right within a tenth. Every stage starts from
  // the survivors that the last one really left; one that went too far is taken back to between the two.
  double adapted() {
    if (target_ < 0.5) return infinity();
    Point low = measure(0), high{};
    low.tail.count = finite_;
    bool bracket = false;
    for (int stage = 0; stage < kMostStages; ++stage) {
      if (low.tail.count <= target_ * 1.1) return low.tail.limit;
      const double goal = bracket ? target_ : std::max(target_, low.tail.count * kFirstShare);
      double limit = exponential_limit(low.tail, goal);
      if (bracket && !(limit < high.tail.limit)) limit = limit_between(low.tail, high.tail, goal);
      std::uint64_t key = key_of(limit);
      if (bracket && stage >= kMostStages / 2) key = low.key + (high.key - low.key) / 2;  // no fit for this
      key = std::max(key, low.key + 1);
      if (bracket) key = std::min(key, high.key - 1);
      if (key <= low.key) break;  // nothing lies between
      const Point next = measure(key);
      if (next.tail.count > target_ * 1.1) {
        low = next;
      } else {
        high = next;
        bracket = true;
        if (next.tail.count >= target_ * 0.9) return next.tail.limit;
      }
    }
    if (!bracket) return low.tail.limit;
    const bool nearer = low.tail.count * high.tail.count < target_ * target_;
    return nearer ? low.tail.limit : high.tail.limit;
  }

  // The paper's: the first stage keeps a quarter, the others an equal share each of what is left.
  double fixed(int stages) {
    if (target_ < 0.5) return infinity();
    const double share = std::min(1.0, target_ / finite_);
    const double first = stages > 1 && share < kFirstShare ? kFirstShare : share;
    Point point = measure(0);
    point.tail.count = finite_;
    double limit = exponential_limit(point.tail, finite_ * first);
    const double step = natural_log(first / share) / (stages > 1 ? stages - 1 : 1);
    for (int stage = 1; stage < stages && first > share; ++stage) {
      point = measure(key_of(limit));
      if (point.tail.count < 0.5) break;
      const double excess = point.tail.sum / point.tail.count - limit;
      limit += (excess > 0 ? excess : 0.0) * step;
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
    return point;
  }

  const Kernels& kernels_;
  bool wide_;
  std::size_t size_;
  Scratch keys_;
  double finite_, target_;
};

}  // namespace

Selected select_sidco(const Kernels& kernels, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                      std::size_t k, int stages, int threads) {
  if (!k) return select_largest(kernels, src, dtype, n, 0, false, threads);
  Fit fit(kernels, src, dtype, n, k);
  const double limit = stages ? fit.fixed(stages) : fit.adapted();
  Selected selected(dtype, n);
  const std::size_t most = sidco_most(n, k), least = stages ? 0 : k - k / 5;
  const std::uint64_t key = std::max<std::uint64_t>(1, least_key(limit, dtype));  // zeros are never sent
  if (selected.collect(kernels, src, {key, 0, 0}, 4 * most, threads)) {
    const std::size_t count = selected.count();
    if (count >= least && count <= most) return selected;
    if (count > most) {
      selected.narrow(kernels, selected.largest(kernels, k, ~std::uint64_t(0)));
      return selected;
    }
  }
  return select_largest(kernels, src, dtype, n, k, false, threads);
}

}  // namespace hybridcomp
