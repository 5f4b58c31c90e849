// Steps of an execution that find each region's owner from how many bytes the regions' messages have.
// hybridcomp/schedules/cuts.py does the same.
#include <cstring>

#include "codecs/messages/opening.hpp"
#include "engine/execution.hpp"

namespace hybridcomp::engine {
namespace {

std::uint32_t none_params() { return kernels().crc32c(reinterpret_cast<const std::uint8_t*>("none"), 4, 0); }

}  // namespace

// Write the sizes as a message by the codec `none`: each rank must cut by the sizes that were sent, or ranks
// find different owners.
bool Execution::write_sizes(std::uint32_t, const Step& step) {
  const auto messages = program_->list(step.slots);
  std::uint8_t* const to = room(step.slot, program_->slots[step.slot].bytes);
  std::uint8_t* const payload = to + sizeof(Header);
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const auto bytes = static_cast<std::uint32_t>(held_[messages[i]].bytes);
    std::memcpy(payload + i * sizeof(bytes), &bytes, sizeof(bytes));
  }
  Header header{};
  header.magic = kMagic;
  header.codec = kNoneId;
  header.dtype = kUint32;
  header.count = messages.size();
  header.payload = messages.size() * sizeof(std::uint32_t);
  header.params = none_params();
  std::memcpy(to, &header, sizeof(header));
  header.crc = crc_of(to, header.payload);
  std::memcpy(to, &header, sizeof(header));
  filled(step, to, sizeof(header) + header.payload, false, true);
  return true;
}

// Give each region to the rank in whose share of all bytes its middle falls.
bool Execution::cut(std::uint32_t index, const Step& step) {
  __extension__ using Wide = unsigned __int128;
  std::vector<std::uint64_t> weights(step.count);
  for (const std::uint32_t slot : program_->list(step.slots)) {
    const Held& held = held_[slot];
    Header header{};
    bool good = read_header(held.data, held.bytes, &header) && header.codec == kNoneId &&
                header.params == none_params() && header.dtype == kUint32 && header.count == step.count &&
                header.payload == step.count * sizeof(std::uint32_t) &&
                (held.trusted || crc_of(held.data, header.payload) == header.crc);
    for (std::size_t i = 0; good && i < step.count; ++i) {
      std::uint32_t bytes = 0;
      std::memcpy(&bytes, held.data + sizeof(Header) + i * sizeof(bytes), sizeof(bytes));
      good = bytes != 0;
      weights[i] += bytes;
    }
    if (!good) {
      fail(Fault::kMessage, index, held.peer, 0, &held);
      return false;
    }
  }
  Wide total = 0, before = 0;
  for (const std::uint64_t weight : weights) total += weight;
  owners_.resize(step.count);
  const auto ranks = static_cast<unsigned>(group_->size);
  for (std::size_t i = 0; i < step.count; ++i) {
    owners_[i] = static_cast<std::int32_t>((2 * before + weights[i]) * ranks / (2 * total));
    before += weights[i];
  }
  return true;
}

}  // namespace hybridcomp::engine
