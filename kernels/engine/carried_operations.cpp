#include "engine/carried_operations.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hybridcomp::engine {
namespace {

constexpr std::size_t kAlign = 16;

// Entry of a table; in the first one the number of messages is in the bytes' place.
struct Row {
  std::int64_t tag, bytes;
};

std::size_t padded(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

std::size_t packed(const std::vector<CarriedOperations::Message>& messages) {
  if (messages.empty()) return 0;
  std::size_t total = (1 + messages.size()) * sizeof(Row);
  for (const auto& message : messages) total += padded(message.bytes);
  return total;
}

}  // namespace

CarriedOperations::CarriedOperations(int rank, const std::vector<bool>& near, const std::vector<bool>& away,
                                     std::shared_ptr<SharedBlocks> blocks)
    : group_(std::make_shared<Group>()),
      engine_(*this, std::move(blocks)),
      leaving_(near.size()),
      receives_(near.size()) {
  group_->rank = rank;
  group_->size = static_cast<int>(near.size());
  group_->place.assign(near.size(), -1);
  group_->near = near;
  group_->away = away;
}

CarriedOperations::~CarriedOperations() { abandon(); }

std::shared_ptr<Execution> CarriedOperations::start(const std::shared_ptr<const Program>& program,
                                                    std::uint32_t first, const std::uint8_t* send,
                                                    std::uint8_t* recv, Memory* memory, bool traced) {
  auto execution =
      std::make_shared<Execution>(engine_, group_, program, first, nullptr, send, recv, memory, traced);
  engine_.start(execution, 0);
  return execution;
}

std::uint32_t CarriedOperations::reserve() {
  const std::lock_guard lock(engine_.mutex());
  return group_->reserve();
}

bool CarriedOperations::run() { return engine_.compute_all(); }

CarriedOperations::Bytes CarriedOperations::collect() {
  const std::lock_guard lock(engine_.mutex());
  for (const Message& message : std::exchange(sends_, {}))
    leaving_[static_cast<std::size_t>(message.peer)].push_back(message);
  Bytes bytes;
  for (std::size_t peer = 0; peer < leaving_.size(); ++peer) {
    std::ranges::stable_sort(leaving_[peer], {}, &Message::tag);
    const bool near = group_->near[peer];
    bytes.sent.push_back(near ? 0 : packed(leaving_[peer]));
    bytes.most.push_back(near ? 0 : packed(receives_[peer]));
  }
  return bytes;
}

void CarriedOperations::pack(int peer, std::uint8_t* out) const {
  const auto& messages = leaving_[static_cast<std::size_t>(peer)];
  std::uint8_t* to = out + (1 + messages.size()) * sizeof(Row);
  Row row{0, static_cast<std::int64_t>(messages.size())};
  std::memcpy(out, &row, sizeof(row));
  for (const Message& message : messages) {
    row = {kCompiled + message.tag, static_cast<std::int64_t>(message.bytes)};
    std::memcpy(out += sizeof(row), &row, sizeof(row));
    std::memcpy(to, message.data, message.bytes);
    std::memset(to + message.bytes, 0, padded(message.bytes) - message.bytes);
    to += padded(message.bytes);
  }
}

void CarriedOperations::pack(int peer, std::vector<Parcelled>* parcel) const {
  for (const Message& message : leaving_[static_cast<std::size_t>(peer)])
    parcel->push_back({kCompiled + message.tag, message.data, message.bytes});
}

void CarriedOperations::sent() {
  const std::lock_guard lock(engine_.mutex());
  // An operation that goes on may fail, and be forgotten, meanwhile.
  for (auto& messages : leaving_)
    while (!messages.empty()) {
      const Message message = messages.back();
      messages.pop_back();
      message.execution->left(message.step);
    }
}

std::string CarriedOperations::unpack(int peer, const std::uint8_t* data, std::size_t bytes, bool* unlike) {
  *unlike = false;
  const auto row_at = [&](std::size_t i) {
    Row row;
    std::memcpy(&row, data + i * sizeof(row), sizeof(row));
    return row;
  };
  const std::string in = " in " + std::to_string(bytes) + " bytes";
  if (bytes < sizeof(Row)) return "no table" + in;
  const Row first = row_at(0);
  if (first.tag || first.bytes <= 0 || static_cast<std::uint64_t>(first.bytes) > bytes / sizeof(Row) - 1)
    return "a table of tag " + std::to_string(first.tag) + " and " + std::to_string(first.bytes) +
           " messages" + in;
  const auto count = static_cast<std::size_t>(first.bytes);
  std::size_t at = (1 + count) * sizeof(Row);
  for (std::size_t i = 0; i < count; ++i) {
    const Row row = row_at(1 + i);
    if (row.tag < kCompiled || row.bytes < 0 || static_cast<std::uint64_t>(row.bytes) > bytes - at ||
        padded(static_cast<std::size_t>(row.bytes)) > bytes - at)
      return "a message of tag " + std::to_string(row.tag) + " and " + std::to_string(row.bytes) +
             " bytes where " + std::to_string(bytes - at) + " follow";
    const auto length = static_cast<std::size_t>(row.bytes);
    std::string fault = deliver(peer, {row.tag, data + at, length}, false);
    if (!fault.empty()) {
      *unlike = true;
      return fault;
    }
    at += padded(length);
  }
  return at == bytes ? "" : std::to_string(bytes - at) + " bytes behind the last message";
}

std::string CarriedOperations::deliver(int peer, const Parcelled& given, bool trusted) {
  const std::lock_guard lock(engine_.mutex());
  auto& waiting = receives_[static_cast<std::size_t>(peer)];
  const auto found = std::ranges::find(waiting, given.tag - kCompiled, &Message::tag);
  if (found == waiting.end() || found->bytes < given.bytes)
    return "rank " + std::to_string(peer) + " sent a message of " + std::to_string(given.bytes) +
           " bytes by tag " + std::to_string(given.tag - kCompiled) + ", rank " +
           std::to_string(group_->rank) +
           (found == waiting.end() ? " expects none" : " has room for " + std::to_string(found->bytes));
  const Message message = *found;
  waiting.erase(found);
  message.execution->arrived(message.step, given.data, given.bytes, trusted);
  return {};
}

void CarriedOperations::abandon() { engine_.abandon_all(); }

void CarriedOperations::forget(const Execution* execution) {
  const auto of = [&](const Message& message) { return message.execution == execution; };
  std::erase_if(sends_, of);
  for (auto& messages : leaving_) std::erase_if(messages, of);
  for (auto& messages : receives_) std::erase_if(messages, of);
}

}  // namespace hybridcomp::engine
