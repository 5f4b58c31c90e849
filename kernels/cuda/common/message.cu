// Headers of messages in device memory: written before a payload that a codec's kernels left there, and
// checked before a decoder reads one.
#include "common/message.cuh"
#include "common/table.cuh"

namespace hybridcomp {
namespace {

// Bytes of a message that the host reads: the header and a codec's prefix, which may hold a message of
// values.
constexpr uint32_t kHeadBytes = 160;

// Part of a message that the host reads.
struct Opened {
  uint32_t status;  // 0, or kOpened* below
  uint32_t crc;     // computed
  uint8_t head[kHeadBytes];
  uint8_t inner[kHeadBytes];  // the same of a sparse codec's inner message, or zeros
};
constexpr uint32_t kOpenedDamaged = 1;  // the CRC is another
constexpr uint32_t kOpenedLength = 2;   // the payload does not fit the buffer; the CRC was not computed

// Return the place of the message of the values in a sparse codec's payload: after k, the bytes of the index
// section, and that section. The payload's end for all other codecs.
HC_DEVICE uint64_t inner_at(const uint8_t* msg, uint64_t payload) {
  const uint8_t codec = reinterpret_cast<const Header*>(msg)->codec;
  if ((codec != kTopkId && codec != kThresholdId && codec != kSidcoId) || payload < 16) return payload;
  const uint64_t indices = reinterpret_cast<const uint64_t*>(msg + sizeof(Header))[1];
  return indices <= payload - 16 ? 16 + indices : payload;
}

// Write the header of the message at `msg` (16-byte aligned). The payload has `payload` bytes, or `*length`
// if that is not null; the message's bytes go to `*total` if that is not null.
HC_DEVICE void seal_message(Grid grid, uint8_t* msg, uint64_t codec, uint64_t dtype, uint64_t count,
                            uint64_t payload, const uint64_t* length, uint32_t params, uint32_t* work,
                            uint64_t* total) {
  HC_SHARED(CrcShared, shared, 1);
  HC_SHARED(Header, header, 1);
  const uint64_t size = length ? *length : payload;
  const uint32_t share = crc_share(msg + sizeof(Header), size, shared, grid);
  uint32_t sum;
  if (!last_block(share, reinterpret_cast<Work*>(work), shared, &sum, grid)) return;
  const Header wanted = {
      kMagic, static_cast<uint8_t>(codec), static_cast<uint8_t>(dtype), 0, count, size, params, 0};
  write_header(msg, wanted, header, *shared, sum);
  if (threadIdx.x == 0 && total) *total = sizeof(Header) + size;
}

// Check the CRC of the message in `capacity` bytes at `msg`, and copy its first bytes for the host. The host
// checks the rest of the header itself.
HC_DEVICE void open_message(Grid grid, const uint8_t* msg, uint64_t capacity, uint32_t* work, uint8_t* opened,
                            uint32_t* status) {
  HC_SHARED(CrcShared, shared, 1);
  const uint32_t lane = threadIdx.x & 31u;
  const bool whole = capacity >= sizeof(Header);
  const uint64_t payload = whole ? reinterpret_cast<const Header*>(msg)->payload : 0;
  const bool fits = whole && payload <= capacity - sizeof(Header);
  // This is read before the block has anything to wait for; the last block's first warp uses it.
  const uint32_t stored = whole ? reinterpret_cast<const Header*>(msg)->crc : 0;
  const uint32_t byte = whole && lane < kCrcAt ? msg[lane] : 0;
  const uint32_t share = crc_share(msg + sizeof(Header), fits ? payload : 0, shared, grid);
  Opened* const out = reinterpret_cast<Opened*>(opened);
  if (grid.block == 0 && threadIdx.x / 32 == 1) {  // this warp is idle by now
    const uint64_t size = fits ? sizeof(Header) + payload : capacity;
    const uint64_t inner = sizeof(Header) + (fits ? inner_at(msg, payload) : 0);
    for (uint32_t i = lane; i < kHeadBytes; i += 32) {
      out->head[i] = i < size ? msg[i] : 0;
      out->inner[i] = fits && inner + i < size ? msg[inner + i] : 0;
    }
  }
  uint32_t sum;
  if (!last_block(share, reinterpret_cast<Work*>(work), shared, &sum, grid)) return;
  const uint32_t crc = fits ? message_crc(byte, shared->length, sum) : 0;
  if (threadIdx.x == 0) {
    const uint32_t code = !fits ? kOpenedLength : crc != stored ? kOpenedDamaged : 0u;
    out->status = code;
    out->crc = crc;
    if (code) fail(status, kBadLength);
  }
}

}  // namespace

HC_KERNEL(kCrcThreads)
message_seal(uint8_t* msg, uint64_t codec, uint64_t dtype, uint64_t count, uint64_t payload,
             const uint64_t* length, uint32_t params, uint32_t* work, uint64_t* total) {
  seal_message(whole_grid(), msg, codec, dtype, count, payload, length, params, work, total);
}
HC_TABLE_FORM(kCrcThreads, message_seal, seal_message)

HC_KERNEL(kCrcThreads)
message_open(const uint8_t* msg, uint64_t capacity, uint32_t* work, uint8_t* opened, uint32_t* status) {
  open_message(whole_grid(), msg, capacity, work, opened, status);
}
HC_TABLE_FORM(kCrcThreads, message_open, open_message)

}  // namespace hybridcomp
