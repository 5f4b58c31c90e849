#include "memory.hpp"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "checks.hpp"
#include "state.hpp"

namespace hc::memory {
namespace {

constexpr std::uint64_t kStaticLimit = 48 * 1024;  // CUDA's limit on a block's __shared__ arrays
constexpr char kDynamicKey = 0;

std::map<std::uintptr_t, std::unique_ptr<Buffer>> buffers;
Buffer* last_buffer = nullptr;

std::vector<SharedArray> shared;
std::uint64_t block_number = 0;

#if defined(HC_CHECKED)
constexpr std::uint64_t kGap = 0;  // AddressSanitizer has its own
#else
constexpr std::uint64_t kGap = 256;  // between shared arrays, and after buffers: small overruns are seen
#endif

void fill(void* at, std::uint64_t bytes, std::uint64_t seed) {
  std::memset(at, static_cast<int>(0xA5 ^ (seed * 29 & 0xFF)), bytes);
}

#if defined(HC_CHECKED)
void* shared_memory(std::uint64_t bytes, std::uint32_t alignment) {
  void* at = nullptr;
  if (posix_memalign(&at, alignment < 16 ? 16 : alignment, bytes) != 0) fail("no memory for a shared array");
  return at;
}
#else
constexpr std::uint64_t kArenaBytes = 1 << 20;
char* arena = nullptr;
std::uint64_t arena_used = 0;
Shadow arena_shadow;

void* shared_memory(std::uint64_t bytes, std::uint32_t alignment) {
  if (!arena) {
    void* map = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) fail("no memory for a shared array");
    arena = static_cast<char*>(map);
    arena_shadow.cover(reinterpret_cast<std::uintptr_t>(arena), kArenaBytes);
  }
  std::uint64_t at = (arena_used + kGap + 255) / 256 * 256;
  // The array is no better aligned than its type asks for, as CUDA promises no more: wider accesses must not
  // work by chance.
  if (alignment < 16) at += alignment;
  if (at + bytes + kGap > kArenaBytes) fail("no memory for a shared array");
  arena_used = at + bytes;
  return arena + at;
}
#endif

void* shared_array(const void* key, const char* name, std::uint64_t bytes, std::uint32_t alignment) {
  SharedArray* found = nullptr;
  for (SharedArray& array : shared) {
    if (array.key == key) found = &array;
  }
  if (!found) {
    std::uint64_t total = key == &kDynamicKey ? 0 : bytes;
    for (const SharedArray& array : shared) total += array.key == &kDynamicKey ? 0 : array.bytes;
    if (total > kStaticLimit) fail("static shared arrays of " + std::to_string(total) + " bytes");
    found = &shared.emplace_back();
    found->key = key;
    found->name = name;
    found->bytes = bytes;
  }
  if (found->bytes != bytes) fail("shared array '" + found->name + "' has two sizes");
  if (found->block != block_number) {
    if (found->begin == 0) {
      found->begin = reinterpret_cast<std::uintptr_t>(shared_memory(bytes, alignment));
    }
    found->block = block_number;
    fill(reinterpret_cast<void*>(found->begin), bytes, launch.seed + launch.block);
  }
  return reinterpret_cast<void*>(found->begin);
}

std::string in_bytes(std::int64_t offset, std::uint64_t bytes) {
  return (offset < 0 ? " - " : " + ") + std::to_string(offset < 0 ? -offset : offset) + " (of " +
         std::to_string(bytes) + " bytes)";
}

// Distance of an address from a range of bytes, 0 inside.
std::uint64_t distance(std::uintptr_t address, std::uintptr_t begin, std::uint64_t bytes) {
  if (address < begin) return begin - address;
  return address < begin + bytes ? 0 : address - (begin + bytes) + 1;
}

std::string buffer_name(const Buffer& buffer) {
  if (!buffer.name.empty()) return "global buffer '" + buffer.name + "'";
  for (std::uint32_t i = 0; i < launch.argument_count; ++i) {
    if (distance(launch.arguments[i], buffer.begin, buffer.bytes) == 0) {
      return "global buffer " + std::to_string(i);
    }
  }
  return "a global buffer that is no argument";
}

}  // namespace

void launch_begins() {
  shared.clear();
#if !defined(HC_CHECKED)
  arena_used = 0;
#endif
}

void block_begins() { ++block_number; }

void block_ends() {
#if defined(HC_CHECKED)
  for (SharedArray& array : shared) {
    std::free(reinterpret_cast<void*>(array.begin));
    array.begin = 0;
  }
#endif
}

Buffer* buffer_at(std::uintptr_t address) {
  if (last_buffer && address - last_buffer->begin < last_buffer->bytes) return last_buffer;
  auto after = buffers.upper_bound(address);
  if (after == buffers.begin()) return nullptr;
  Buffer* buffer = std::prev(after)->second.get();
  if (address - buffer->begin >= buffer->bytes) return nullptr;
  return last_buffer = buffer;
}

const SharedArray* shared_at(std::uintptr_t address) {
  for (const SharedArray& array : shared) {
    if (array.block == block_number && address - array.begin < array.bytes) return &array;
  }
  return nullptr;
}

#if defined(HC_CHECKED)
bool in_shared_memory(std::uintptr_t address) { return shared_at(address) != nullptr; }
Shadow& shared_shadow() { std::abort(); }
#else
bool in_shared_memory(std::uintptr_t address) {
  return arena && address - reinterpret_cast<std::uintptr_t>(arena) < kArenaBytes;
}
Shadow& shared_shadow() { return arena_shadow; }
#endif

std::string place(std::uintptr_t address) {
  constexpr std::uint64_t kNear = 64 * 1024;
  std::uint64_t nearest = kNear;
  std::string text;
  if (!in_shared_memory(address)) {
    for (const auto& [begin, buffer] : buffers) {
      const std::uint64_t apart = distance(address, begin, buffer->bytes);
      if (apart >= nearest) continue;
      nearest = apart;
      text = buffer_name(*buffer) + in_bytes(static_cast<std::int64_t>(address - begin), buffer->bytes);
    }
  } else {
    for (const SharedArray& array : shared) {
      const std::uint64_t apart = distance(address, array.begin, array.bytes);
      if (apart >= nearest) continue;
      nearest = apart;
      text = "shared array '" + array.name + "'" +
             in_bytes(static_cast<std::int64_t>(address - array.begin), array.bytes);
    }
  }
  if (!text.empty()) return text;
  char number[40];
  std::snprintf(number, sizeof number, "address 0x%llx", static_cast<unsigned long long>(address));
  return number + std::string(", near no global buffer or shared array");
}

}  // namespace hc::memory

using namespace hc::memory;

extern "C" {

void* hc_shared(const void* key, const char* name, std::uint64_t bytes, std::uint32_t alignment) {
  return shared_array(key, name, bytes, alignment);
}

void* hc_dynamic_shared(const char* name) {
  return shared_array(&kDynamicKey, name, hc::launch.dynamic_bytes, 16);
}

void hc_register(void* at, std::uint64_t bytes, const char* name) {
  auto buffer = std::make_unique<Buffer>();
  buffer->begin = reinterpret_cast<std::uintptr_t>(at);
  buffer->bytes = bytes;
  buffer->name = name ? name : "";
#if !defined(HC_CHECKED)
  buffer->shadow.cover(buffer->begin, bytes);
#endif
  last_buffer = nullptr;
  buffers[buffer->begin] = std::move(buffer);
}

void hc_unregister(void* at) {
  last_buffer = nullptr;
  buffers.erase(reinterpret_cast<std::uintptr_t>(at));
}

// Allocate as cudaMalloc aligns, and fill with bytes that no kernel should take for its input.
void* hc_malloc(std::uint64_t bytes) {
  void* at = nullptr;
  if (posix_memalign(&at, 256, bytes + kGap) != 0) return nullptr;
  fill(at, bytes, 1);
  hc_register(at, bytes, nullptr);
  return at;
}

void hc_free(void* at) {
  if (!at) return;
  hc_unregister(at);
  std::free(at);
}
}
