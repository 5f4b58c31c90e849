// The header of a message in device memory: written over a payload that a codec's kernels left there, and
// checked before a decoder reads one.
#include "crc.cuh"

namespace hybridcomp {
namespace {

// Bytes of a message that the host wants to see: the header and a codec's prefix, which may hold a message of
// values.
constexpr uint32_t kHeadBytes = 160;

// What a grid has between its blocks. All zero before a launch and after it.
struct Work {
  uint32_t crc;   // shares so far
  uint32_t done;  // blocks
};

// What the host reads of a message.
struct Opened {
  uint32_t status;  // 0, or kOpened* below
  uint32_t crc;     // computed
  uint8_t head[kHeadBytes];
};
constexpr uint32_t kOpenedDamaged = 1;  // the CRC is another
constexpr uint32_t kOpenedLength = 2;   // the payload does not fit the buffer; the CRC was not computed

// True in the first warp of the last block to come here, with the sum of all shares.
HC_DEVICE bool last_block(uint32_t share, Work* work, uint32_t* shared, uint32_t* sum) {
  if (threadIdx.x == 0) {
    atomicXor(&work->crc, share);
    __threadfence();
    shared[0] = atomicAdd(&work->done, 1u) + 1 == gridDim.x;
    if (shared[0]) {
      __threadfence();
      shared[1] = atomicExch(&work->crc, 0u);
      atomicExch(&work->done, 0u);
    }
  }
  __syncthreads();
  *sum = shared[1];
  return shared[0] && threadIdx.x < 32;
}

// The CRC of a message with 28 bytes of header, by a whole warp.
HC_DEVICE uint32_t message_crc(const uint8_t* header, uint64_t payload, uint32_t share) {
  uint32_t crc = ~0u;
  for (size_t i = 0; i < kCrcAt; ++i) crc = crc_byte(crc, header[i]);
  return ~(crc_multiply(crc_zeros(payload), crc) ^ share);
}

}  // namespace

// Write the header of the message at `msg` (16-byte aligned). The payload has `payload` bytes, or `*length`
// if that is not null; the message's bytes go to `*total` if that is not null.
HC_KERNEL(kCrcThreads)
message_seal(uint8_t* msg, uint64_t codec, uint64_t dtype, uint64_t count, uint64_t payload,
             const uint64_t* length, uint32_t params, uint32_t* work, uint64_t* total) {
  HC_SHARED(uint32_t, table, 1024);
  HC_SHARED(uint32_t, sums, kCrcThreads / 32);
  HC_SHARED(uint32_t, shared, 2);
  const uint64_t size = length ? *length : payload;
  crc_fill_table(table);
  if (threadIdx.x == 0) shared[0] = shared[1] = 0;
  __syncthreads();
  const uint32_t share = crc_share(msg + sizeof(Header), size, table, sums);
  uint32_t sum;
  if (!last_block(share, reinterpret_cast<Work*>(work), shared, &sum)) return;
  Header header{kMagic, static_cast<uint8_t>(codec), static_cast<uint8_t>(dtype), 0, count, size, params, 0};
  header.crc = message_crc(reinterpret_cast<const uint8_t*>(&header), size, sum);
  if (threadIdx.x == 0) {
    *reinterpret_cast<Header*>(msg) = header;
    if (total) *total = sizeof(Header) + size;
  }
}

// Check the CRC of the message in `capacity` bytes at `msg`, and copy its first bytes for the host. Anything
// else that a header may have wrong the host sees for itself.
HC_KERNEL(kCrcThreads)
message_open(const uint8_t* msg, uint64_t capacity, uint32_t* work, uint8_t* opened, uint32_t* status) {
  HC_SHARED(uint32_t, table, 1024);
  HC_SHARED(uint32_t, sums, kCrcThreads / 32);
  HC_SHARED(uint32_t, shared, 2);
  const bool whole = capacity >= sizeof(Header);
  const uint64_t payload = whole ? reinterpret_cast<const Header*>(msg)->payload : 0;
  const bool fits = whole && payload <= capacity - sizeof(Header);
  crc_fill_table(table);
  if (threadIdx.x == 0) shared[0] = shared[1] = 0;
  __syncthreads();
  const uint32_t share = crc_share(msg + sizeof(Header), fits ? payload : 0, table, sums);
  uint32_t sum;
  if (!last_block(share, reinterpret_cast<Work*>(work), shared, &sum)) return;
  Opened* out = reinterpret_cast<Opened*>(opened);
  const uint64_t size = fits ? sizeof(Header) + payload : capacity;
  for (uint32_t i = threadIdx.x; i < kHeadBytes; i += 32) out->head[i] = i < size ? msg[i] : 0;
  const uint32_t crc = fits ? message_crc(msg, payload, sum) : 0;
  if (threadIdx.x == 0) {
    const uint32_t code = !fits                                              ? kOpenedLength
                          : crc != reinterpret_cast<const Header*>(msg)->crc ? kOpenedDamaged
                                                                             : 0u;
    out->status = code;
    out->crc = crc;
    if (code) fail(status, kBadLength);
  }
}

}  // namespace hybridcomp
