// Choice among the instruction sets that this CPU has.
#include <atomic>
#include <cstring>

#include "codecs/common/kernels.hpp"
#include "codecs/common/parallel.hpp"

#if HC_X86
#include <cpuid.h>
#endif

namespace hybridcomp {

// HC_WITH_...: an instruction set whose kernels were compiled (HC_ISAS in kernels/CMakeLists.txt).
namespace portable {
extern const Kernels table;
}
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}

namespace {

#if HC_X86
bool has_f16c() {  // not every compiler's __builtin_cpu_supports knows F16C
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

struct Available {
  Kernels tables[3];
  const Kernels* pointers[3];
  std::size_t count = 0;

  void add(const Kernels& table, Crc32cFn crc) {
    tables[count] = table;
    tables[count].crc32c = crc;
    pointers[count] = &tables[count];
    ++count;
  }

  Available() {
#if HC_X86
    __builtin_cpu_init();
    [[maybe_unused]] const bool avx2 = __builtin_cpu_supports("avx2") && has_f16c() &&
                                       __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                                       __builtin_cpu_supports("popcnt");
#if HC_WITH_avx512
    const bool clmul = __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
      add(avx512::table, clmul ? crc32c_vpclmul : crc32c_sse42);
#endif
#if HC_WITH_avx2
    if (avx2) add(avx2::table, crc32c_sse42);
#endif
#endif
#if HC_WITH_portable
    add(portable::table, crc32c_table);
#endif
  }
};

const Available& available() {
  static const Available a;
  return a;
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> k{available().pointers[0]};
  return k;
}

std::atomic<int> threads{1};

}  // namespace

int thread_count() { return threads.load(std::memory_order_relaxed); }
void set_thread_count(int count) { threads.store(count, std::memory_order_relaxed); }

const Kernels* const* available_kernels(std::size_t* count) {
  *count = available().count;
  return available().pointers;
}

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

bool use_kernels(const char* isa_name) {
  for (std::size_t i = 0; i < available().count; ++i) {
    if (std::strcmp(available().pointers[i]->name, isa_name) == 0) {
      current().store(available().pointers[i], std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace hybridcomp
