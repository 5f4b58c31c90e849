#include <algorithm>
#include <cstring>
#include <utility>

#include "codecs/feedback/memories.hpp"
#include "codecs/feedback/passes.hpp"

namespace hybridcomp {
namespace {

// Whether any of n values is not zero.
template <typename T>
bool any_of(const std::uint8_t* values, std::size_t n) {
  constexpr std::size_t kTile = 1024;
  const T* const x = reinterpret_cast<const T*>(values);
  for (std::size_t begin = 0; begin < n; begin += kTile) {
    const std::size_t end = std::min(n, begin + kTile);
    unsigned found = 0;
    for (std::size_t i = begin; i < end; ++i) found |= x[i] != T(0);
    if (found) return true;
  }
  return false;
}

}  // namespace

EstimateMemory::EstimateMemory(std::size_t n, bool wide, std::shared_ptr<Rooms> rooms)
    : Memory(n, wide, std::move(rooms)), sent_(zeros()) {}

std::uint64_t EstimateMemory::begin() {
  settle(true);
  owns_.clear();
  return Memory::begin();
}

void EstimateMemory::correct(const Kernels& k, const std::uint8_t* x, DTypeCode dtype, std::size_t n,
                             std::size_t start, int threads, std::uint8_t* out) {
  add_pass(k, {x, dtype}, at(sent_, start), out, n, true, threads);
}

void EstimateMemory::keep(const Kernels& k, const std::uint8_t*, Lease& decoded, std::size_t n,
                          std::size_t start, double, int threads) {
  const Span span{start, n};
  // A whole array replaces the values that wait, which stay until the new ones are known to be good.
  const bool apart = n == n_ || waiting_.meets(span);
  std::uint8_t* const to = apart ? decoded.data() : place(waiting_, span);
  const bool finite = add_pass(k, {decoded.data(), kind()}, at(sent_, start), to, n, false, threads);
  if (finite && n == n_ && decoded.owned())
    std::swap(waiting_.values, decoded);
  else if (finite && apart && n)
    std::memcpy(place(waiting_, span), to, n * size_of(kind()));
  if (finite) waiting_.put(span);
  if (waiting_.spans.empty()) waiting_.values.release();
}

bool EstimateMemory::own(const Kernels& k, const Encoder&, const std::uint8_t* x, DTypeCode dtype,
                         std::size_t n, std::size_t start, int threads, std::uint8_t* sums) {
  std::uint8_t* const total = at(made(total_), start);
  std::uint8_t* const mine = at(sent_, start);
  const std::size_t bytes = n * size_of(kind());
  if (wide_ ? any_of<double>(mine, n) : any_of<float>(mine, n)) {
    // Other ranks owned this span before: the sum holds the values that this rank sent then.
    add_pass(k, {total, kind()}, mine, total, n, true, threads);
    std::memset(mine, 0, bytes);
  }
  const Span span{start, n};
  std::erase_if(owns_, [&](const Part& part) { return part.span == span; });
  owns_.push_back({span, x, dtype});
  if (n) std::memcpy(sums, total, bytes);
  return true;
}

bool EstimateMemory::owned(std::size_t n, std::size_t start) const {
  const Span span{start, n};
  return std::any_of(owns_.begin(), owns_.end(), [&](const Part& part) { return part.span == span; });
}

void EstimateMemory::correct_sum(const Kernels& k, std::uint8_t* total, std::size_t n, std::size_t start,
                                 int ranks, int threads) {
  const Span span{start, n};
  const auto own =
      std::find_if(owns_.begin(), owns_.end(), [&](const Part& part) { return part.span == span; });
  if (own == owns_.end()) return;
  if (n) std::memcpy(place(summed_, span), total, n * size_of(kind()));
  summed_.put(span);
  add_pass(k, {own->x, own->dtype}, total, total, n, false, threads);
  owns_.erase(own);
  divide_pass(k, total, wide_, n, ranks, threads);
  add_pass(k, {total, kind()}, at(made(known_), start), total, n, true, threads);
}

void EstimateMemory::result(const Kernels& k, std::uint8_t* values, std::size_t n, std::size_t start,
                            int threads) {
  std::uint8_t* const known = at(made(known_), start);
  const bool finite = add_pass(k, {values, kind()}, known, values, n, false, threads);
  if (finite && n) std::memcpy(known, values, n * size_of(kind()));
  settle({start, n}, finite);
}

void EstimateMemory::add(const Kernels& k, const std::uint8_t* decoded, int threads, std::uint8_t* out) {
  std::uint8_t* const total = made(total_)->data();
  const bool finite = add_pass(k, {decoded, kind()}, total, out, n_, false, threads);
  if (finite && n_) std::memcpy(total, out, n_ * size_of(kind()));
  settle(finite);
}

void EstimateMemory::settle(bool good) {
  while (!waiting_.spans.empty()) settle(waiting_.spans.front(), good);
  summed_.spans.clear();
  summed_.values.release();
}

void EstimateMemory::settle(Span span, bool good) {
  end(waiting_, sent_, span, good);
  end(summed_, total_, span, good);
}

void EstimateMemory::end(Pending& pending, RoomPointer& state, Span span, bool good) {
  if (!pending.take(span)) return;
  if (good && !(span.n == n_ && pending.values.exchange(state)) && span.n)
    std::memcpy(at(state, span.start), place(pending, span), span.n * size_of(kind()));
  if (pending.spans.empty()) pending.values.release();
}

std::uint8_t* EstimateMemory::place(Pending& pending, Span span) {
  if (!pending.values) pending.values = lease(n_);
  return pending.values.data() + span.start * size_of(kind());
}

void EstimateMemory::Pending::put(Span span) {
  take(span);
  spans.push_back(span);
}

bool EstimateMemory::Pending::take(Span span) { return std::erase(spans, span) != 0; }

bool EstimateMemory::Pending::meets(Span span) const {
  return std::any_of(spans.begin(), spans.end(), [&](const Span& other) {
    return span.start < other.start + other.n && other.start < span.start + span.n;
  });
}

RoomPointer& EstimateMemory::made(RoomPointer& state) const {
  if (!state) state = zeros();
  return state;
}

RoomPointer EstimateMemory::state(std::string_view name, bool make) {
  if (name.empty()) return sent_;
  if (name != "total" && name != "known") return nullptr;
  RoomPointer& found = name == "total" ? total_ : known_;
  return make ? made(found) : found;
}

}  // namespace hybridcomp
