// CRC-32C (Castagnoli, reflected 0x82F63B78), the checksum of iSCSI and of hybridcomp's messages.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hybridcomp {

using Crc32cFn = std::uint32_t (*)(const std::uint8_t* data, std::size_t size, std::uint32_t crc);

// Continue `crc` (0 at first) over `size` bytes: table-driven, eight bytes at a time.
std::uint32_t crc32c_table(const std::uint8_t* data, std::size_t size, std::uint32_t crc);

// The same by the SSE4.2 instruction, three streams interleaved; only where the CPU has it.
std::uint32_t crc32c_sse42(const std::uint8_t* data, std::size_t size, std::uint32_t crc);

// The same by carry-less multiplication of 512-bit vectors; only where the CPU has it.
std::uint32_t crc32c_vpclmul(const std::uint8_t* data, std::size_t size, std::uint32_t crc);

// The CRC of A followed by B, from the CRC of each; `size_b` is B's length in bytes.
std::uint32_t crc32c_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t size_b);

}  // namespace hybridcomp
