#include "engine/lanes.hpp"

#include <cstring>
#include <limits>

#include "engine/waiting/clock.hpp"

namespace hybridcomp::engine {
namespace {

constexpr double kPause = 50e-6;  // seconds between two looks at a ring that is full

// The table of a parcel begins with the number of its messages, in a row's place.
struct Row {
  std::int64_t tag;
  std::uint64_t block;  // offsets in the sender's arena: the block that holds the message, and its first byte
  std::uint64_t at;
  std::uint64_t bytes;
};

bool within(const Arena& arena, std::uint64_t at, std::uint64_t bytes) {
  return bytes <= arena.bytes && at <= arena.bytes - bytes;
}

}  // namespace

std::uint8_t* SharedBlocks::take(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  std::uint8_t* const block = blocks_.take(bytes);
  taken_[block] = bytes;
  return block;
}

bool SharedBlocks::give(const std::uint8_t* block) {
  const std::lock_guard lock(mutex_);
  if (!taken_.erase(block)) return false;
  blocks_.give(arena().base + (block - arena().base));
  return true;
}

std::size_t SharedBlocks::used() {
  const std::lock_guard lock(mutex_);
  return blocks_.used();
}

std::size_t SharedBlocks::held() {
  const std::lock_guard lock(mutex_);
  return taken_.size();
}

std::uint8_t* SharedBlocks::lease(const std::uint8_t* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  auto after = taken_.upper_bound(data);
  if (after == taken_.begin()) return nullptr;
  const auto& [start, size] = *--after;
  if (const auto skipped = static_cast<std::size_t>(data - start); skipped > size || bytes > size - skipped)
    return nullptr;
  std::uint8_t* const block = arena().base + (start - arena().base);
  lease_of(block).fetch_add(1, std::memory_order_relaxed);
  return block;
}

Lanes::Lanes(std::shared_ptr<SharedBlocks> blocks, std::size_t neighbours)
    : blocks_(std::move(blocks)), expected_(neighbours), rings_(blocks_->take(neighbours * Ring::kBytes)) {
  std::memset(rings_, 0, neighbours * Ring::kBytes);
  neighbours_.reserve(neighbours);
  // Whoever may still write there keeps the block from its next user.
  lease_of(rings_).fetch_add(static_cast<std::uint32_t>(neighbours), std::memory_order_relaxed);
}

Lanes::~Lanes() {
  for (const auto& [exchange, blocks] : leased_)
    for (std::uint8_t* const block : blocks) lease_of(block).fetch_sub(1);
  for (const Neighbour& n : neighbours_) lease_of(n.rings).fetch_sub(1);
  blocks_->give(rings_);
}

bool Lanes::connect(const Arena& arena, std::size_t rings, std::size_t to, std::size_t from) {
  const std::size_t all = expected_ * Ring::kBytes;
  if (neighbours_.size() == expected_ || !arena.base || !arena.holds(rings, all) || to >= expected_ ||
      from >= expected_)
    return false;
  std::uint8_t* const theirs = arena.base + rings;
  Neighbour& n = neighbours_.emplace_back();
  n.arena = arena;
  n.rings = theirs;
  n.to = Ring(theirs + to * Ring::kBytes);
  n.from = Ring(rings_ + from * Ring::kBytes);
  return true;
}

bool Lanes::send(std::size_t index, std::uint32_t exchange, const std::vector<Parcelled>& messages,
                 double seconds) {
  const Arena& own = blocks_->arena();
  std::size_t bytes = (1 + messages.size()) * sizeof(Row);
  std::vector<std::uint8_t*> lent(messages.size());
  for (std::size_t i = 0; i < messages.size(); ++i) {
    lent[i] = blocks_->lease(messages[i].data, messages[i].bytes);
    if (!lent[i]) bytes += (messages[i].bytes + kLine - 1) / kLine * kLine;
  }
  std::uint8_t* const block = blocks_->take(bytes);
  auto* const rows = reinterpret_cast<Row*>(block);
  rows[0] = {static_cast<std::int64_t>(messages.size()), 0, 0, 0};
  std::uint8_t* copied = block + (1 + messages.size()) * sizeof(Row);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const Parcelled& m = messages[i];
    const std::uint8_t* data = m.data;
    if (!lent[i]) {
      std::memcpy(copied, m.data, m.bytes);
      data = copied;
      copied += (m.bytes + kLine - 1) / kLine * kLine;
      lease_of(block).fetch_add(1, std::memory_order_relaxed);
    }
    rows[i + 1] = {m.tag, static_cast<std::uint64_t>((lent[i] ? lent[i] : block) - own.base),
                   static_cast<std::uint64_t>(data - own.base), m.bytes};
  }
  const bool sent = push(neighbours_[index], exchange, block, bytes, seconds);
  if (!sent)
    for (std::uint8_t* const each : lent) lease_of(each ? each : block).fetch_sub(1);
  blocks_->give(block);
  return sent;
}

void Lanes::leave(std::size_t index, const std::string& why) {
  std::uint8_t* const block = blocks_->take(why.size());
  std::memcpy(block, why.data(), why.size());
  push(neighbours_[index], kLeft, block, why.size(), 0);
  blocks_->give(block);
}

bool Lanes::push(Neighbour& to, std::uint32_t exchange, std::uint8_t* block, std::size_t bytes,
                 double seconds) {
  const auto offset = static_cast<std::uint64_t>(block - blocks_->arena().base);
  lease_of(block).fetch_add(1, std::memory_order_relaxed);  // before the entry is pushed
  const double until = now() + seconds;
  while (!to.to.push({offset, bytes, exchange, 0, 0, {}})) {
    if (now() >= until) {
      lease_of(block).fetch_sub(1, std::memory_order_relaxed);
      return false;
    }
    for (Neighbour& each : neighbours_) drain(each);  // they may wait for room, too
    sleep_for(kPause);
  }
  Bell::of(to.arena).ring();
  return true;
}

bool Lanes::wait(std::uint32_t exchange, double seconds) {
  const double until = now() + seconds;
  Bell& bell = Bell::of(blocks_->arena());
  while (!look(exchange)) {
    Sleeper sleeper(bell);
    if (look(exchange)) return true;
    const double left = until - now();
    if (left <= 0) return false;
    sleeper.sleep(left);
  }
  return true;
}

bool Lanes::look(std::uint32_t exchange) {
  bool all = true, gone = false;
  for (Neighbour& n : neighbours_) {
    drain(n);
    all = all && n.early.contains(exchange);
    gone = gone || (n.gone && !n.early.contains(exchange));
  }
  return all || gone;
}

void Lanes::drain(Neighbour& from) {
  Entry entry;
  while (from.from.pop(&entry)) {
    if (entry.sequence != kLeft) {
      from.early[entry.sequence] = entry;
      continue;
    }
    from.gone = true;
    if (!from.arena.holds(entry.offset, entry.bytes)) continue;
    std::uint8_t* const block = from.arena.base + entry.offset;
    from.why.assign(reinterpret_cast<const char*>(block), entry.bytes);
    lease_of(block).fetch_sub(1);
  }
}

bool Lanes::here(std::size_t index, std::uint32_t exchange) const {
  return neighbours_[index].early.contains(exchange);
}

bool Lanes::left(std::size_t index, std::string* why) const {
  *why = neighbours_[index].why;
  return neighbours_[index].gone;
}

bool Lanes::read(std::size_t index, std::uint32_t exchange, std::vector<Parcelled>* messages) {
  Neighbour& n = neighbours_[index];
  const auto found = n.early.find(exchange);
  if (found == n.early.end()) return false;
  const Entry entry = found->second;
  n.early.erase(found);
  if (entry.bytes < sizeof(Row) || !n.arena.holds(entry.offset, entry.bytes)) return false;
  std::uint8_t* const block = n.arena.base + entry.offset;
  std::vector<std::uint8_t*>& leased = leased_[exchange];
  leased.push_back(block);
  const auto* const rows = reinterpret_cast<const Row*>(block);
  const auto count = static_cast<std::uint64_t>(rows[0].tag);
  if (count > entry.bytes / sizeof(Row) - 1) return false;
  for (std::uint64_t i = 1; i <= count; ++i) {
    const Row row = rows[i];
    if (!n.arena.holds(row.block, 0) || !within(n.arena, row.at, row.bytes)) return false;
    leased.push_back(n.arena.base + row.block);
    messages->push_back({row.tag, n.arena.base + row.at, row.bytes});
  }
  return true;
}

void Lanes::release(std::uint32_t exchange) {
  const auto found = leased_.find(exchange);
  if (found == leased_.end()) return;
  for (std::uint8_t* const block : found->second) lease_of(block).fetch_sub(1);
  leased_.erase(found);
}

}  // namespace hybridcomp::engine
