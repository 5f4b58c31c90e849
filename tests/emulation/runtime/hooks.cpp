// Functions that -fsanitize=thread makes the kernels call at each access, in place of ThreadSanitizer's own
// library.
#include <cstring>

#include "checks.hpp"

namespace {

using hc::checks::Access;

inline void hook(const volatile void* address, std::uint64_t bytes, Access kind, void* caller) {
  if (!hc::checks::active) return;
  hc::checks::access(reinterpret_cast<std::uintptr_t>(address), bytes, kind, caller);
}

// The compiler calls these for types that want alignment; for unaligned accesses it calls others.
inline void aligned(const volatile void* address, std::uint64_t bytes, Access kind, void* caller) {
  if (!hc::checks::active) return;
  if (reinterpret_cast<std::uintptr_t>(address) & (bytes - 1)) hc::checks::misaligned(address, bytes, caller);
  hc::checks::access(reinterpret_cast<std::uintptr_t>(address), bytes, kind, caller);
}

}  // namespace

#define HC_CALLER __builtin_return_address(0)
#define HC_HOOKS(bytes)                                                                               \
  void __tsan_read##bytes(void* p) { aligned(p, bytes, Access::kRead, HC_CALLER); }                   \
  void __tsan_write##bytes(void* p) { aligned(p, bytes, Access::kWrite, HC_CALLER); }                 \
  void __tsan_volatile_read##bytes(void* p) { aligned(p, bytes, Access::kRead, HC_CALLER); }          \
  void __tsan_volatile_write##bytes(void* p) { aligned(p, bytes, Access::kWrite, HC_CALLER); }        \
  void __tsan_unaligned_read##bytes(void* p) { hook(p, bytes, Access::kRead, HC_CALLER); }            \
  void __tsan_unaligned_write##bytes(void* p) { hook(p, bytes, Access::kWrite, HC_CALLER); }          \
  void __tsan_unaligned_volatile_read##bytes(void* p) { hook(p, bytes, Access::kRead, HC_CALLER); }   \
  void __tsan_unaligned_volatile_write##bytes(void* p) { hook(p, bytes, Access::kWrite, HC_CALLER); } \
  void __tsan_read_write##bytes(void* p) {                                                            \
    aligned(p, bytes, Access::kRead, HC_CALLER);                                                      \
    aligned(p, bytes, Access::kWrite, HC_CALLER);                                                     \
  }                                                                                                   \
  void __tsan_unaligned_read_write##bytes(void* p) {                                                  \
    hook(p, bytes, Access::kRead, HC_CALLER);                                                         \
    hook(p, bytes, Access::kWrite, HC_CALLER);                                                        \
  }

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
HC_HOOKS(1)
HC_HOOKS(2)
HC_HOOKS(4)
HC_HOOKS(8)
HC_HOOKS(16)
void __tsan_read_range(void* p, std::uint64_t bytes) { hook(p, bytes, Access::kRead, HC_CALLER); }
void __tsan_write_range(void* p, std::uint64_t bytes) { hook(p, bytes, Access::kWrite, HC_CALLER); }
void __tsan_vptr_update(void** p, void*) { hook(p, sizeof *p, Access::kWrite, HC_CALLER); }
void __tsan_vptr_read(void** p) { hook(p, sizeof *p, Access::kRead, HC_CALLER); }

// clang calls the first three; for gcc the linker's --wrap makes the others.
void* __tsan_memcpy(void* to, const void* from, std::uint64_t bytes) {
  hook(from, bytes, Access::kRead, HC_CALLER);
  hook(to, bytes, Access::kWrite, HC_CALLER);
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, std::uint64_t bytes) {
  hook(from, bytes, Access::kRead, HC_CALLER);
  hook(to, bytes, Access::kWrite, HC_CALLER);
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, std::uint64_t bytes) {
  hook(to, bytes, Access::kWrite, HC_CALLER);
  return std::memset(to, value, bytes);
}
void* __wrap_memcpy(void* to, const void* from, std::uint64_t bytes) {
  hook(from, bytes, Access::kRead, HC_CALLER);
  hook(to, bytes, Access::kWrite, HC_CALLER);
  return std::memcpy(to, from, bytes);
}
void* __wrap_memmove(void* to, const void* from, std::uint64_t bytes) {
  hook(from, bytes, Access::kRead, HC_CALLER);
  hook(to, bytes, Access::kWrite, HC_CALLER);
  return std::memmove(to, from, bytes);
}
void* __wrap_memset(void* to, int value, std::uint64_t bytes) {
  hook(to, bytes, Access::kWrite, HC_CALLER);
  return std::memset(to, value, bytes);
}
}
