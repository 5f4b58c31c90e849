#include "checks.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <unordered_map>

#include "memory.hpp"
#include "order.hpp"

namespace hc::checks {

bool wanted = true;
bool active = false;

namespace {

std::uintptr_t stack_begin = 0;  // start of the running thread's stack

// The library that holds the kernel: its constants may be read.
struct Image {
  std::string path;
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
};
std::unordered_map<const void*, Image> images;
const Image* image = nullptr;

int measure(dl_phdr_info* info, std::size_t, void* data) {
  auto* found = static_cast<Image*>(data);
  if (info->dlpi_addr != found->begin) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    const std::uintptr_t end = info->dlpi_addr + segment.p_vaddr + segment.p_memsz;
    if (segment.p_type == PT_LOAD && end > found->end) found->end = end;
  }
  return 1;
}

const Image* image_of(const void* kernel) {
  Image& found = images[kernel];
  Dl_info info;
  if (found.end == 0 && dladdr(kernel, &info)) {
    found.path = info.dli_fname;
    found.begin = reinterpret_cast<std::uintptr_t>(info.dli_fbase);
    dl_iterate_phdr(measure, &found);
  }
  return &found;
}

// An address for emulator.py, which puts the source line in its place.
std::string at(std::uint32_t caller) {
  char text[32];
  std::snprintf(text, sizeof text, "+0x%x]", caller - 1);
  return " [" + image->path + text;
}

const char* verb(Access kind) {
  switch (kind) {
    case Access::kRead:
      return "reads ";
    case Access::kWrite:
      return "writes ";
    default:
      return "does an atomic on ";
  }
}

[[noreturn]] void fail_race(const Record& other, bool wrote, const Record& self, Access kind,
                            std::uintptr_t address) {
  const char* what = other.atomic ? " did an atomic" : wrote ? " wrote" : " read";
  std::string who = "thread " + std::to_string(other.thread);
  if (!order::in_block(other)) who += " of block " + std::to_string(order::block_of(other));
  fail(std::string("race: it ") + verb(kind) + memory::place(address) + at(self.caller) + ", where " + who +
       what + at(other.caller) + ", and nothing orders the two");
}

// Shared memory begins anew in each block.
bool over(const Record& record, bool shared) {
  return shared && !order::in_block(record) ? true : order::before(record);
}

// Keep `made` among two records of a kind, such that those concurrent accesses stay that most others race
// with: of different blocks, else of different warps.
void keep(Record (&records)[2], const Record& made, bool shared) {
  for (Record& record : records) {
    if (record.block == made.block && record.thread == made.thread) {
      record = made;
      return;
    }
  }
  for (Record& record : records) {
    if ((shared && !order::in_block(record)) || order::before_by_barriers(record)) {
      record = made;
      return;
    }
  }
  if (records[0].block == records[1].block) {
    const bool one_warp = records[0].thread / kWarp == records[1].thread / kWarp;
    const bool other_warp = made.thread / kWarp != records[0].thread / kWarp;
    if (made.block != records[0].block || (one_warp && other_warp)) records[1] = made;
  }
}

void check(Cell& cell, const Record& made, Access kind, std::uintptr_t address, bool shared) {
  if (shared && kind != Access::kWrite && !order::in_block(cell.writes[0]) &&
      !order::in_block(cell.writes[1])) {
    fail(std::string("it ") + verb(kind) + memory::place(address) + at(made.caller) +
         ", which no thread of the block has written");
  }
  for (const Record& other : cell.writes) {
    if (kind == Access::kAtomic && other.atomic) continue;
    if (!over(other, shared)) fail_race(other, true, made, kind, address);
  }
  if (kind == Access::kRead) {
    keep(cell.reads, made, shared);
    return;
  }
  for (const Record& other : cell.reads) {
    if (!over(other, shared)) fail_race(other, false, made, kind, address);
  }
  if (kind == Access::kAtomic) {
    keep(cell.writes, made, shared);
  } else {
    cell.writes[0] = made;
    cell.writes[1] = Record{};
  }
}

}  // namespace

void launch_begins() {
#if !defined(HC_CHECKED)
  active = wanted;
#endif
  if (!active) return;
  image = image_of(reinterpret_cast<const void*>(launch.kernel));
  order::launch_begins();
}

void launch_ends() { active = false; }

void block_begins() {
  memory::block_begins();
  if (active) order::block_begins();
}

void block_ends() { memory::block_ends(); }

void running(const Thread& thread) { stack_begin = reinterpret_cast<std::uintptr_t>(thread.context.stack); }

void barrier() {
  if (active) order::barrier();
}

void warp_barrier(std::uint32_t warp, std::uint32_t mask) {
  if (active) order::warp_barrier(warp, mask);
}

void fence() {
  if (active) order::fence();
}

void access(std::uintptr_t address, std::uint64_t bytes, Access kind, void* caller) {
  if (address - stack_begin < kStackBytes || bytes == 0) return;
  count_step();
  Record made = order::now();
  made.atomic = kind == Access::kAtomic;
  made.caller = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(caller) - image->begin);
  const bool shared = memory::in_shared_memory(address);
  std::uintptr_t begin = 0, end = 0;
  Shadow* shadow = nullptr;
  if (shared) {
    if (const memory::SharedArray* array = memory::shared_at(address)) {
      begin = array->begin;
      end = begin + array->bytes;
      shadow = &memory::shared_shadow();
    }
  } else if (memory::Buffer* buffer = memory::buffer_at(address)) {
    begin = buffer->begin;
    end = begin + buffer->bytes;
    shadow = &buffer->shadow;
  }
  if (!shadow || bytes > end - address) {
    if (!shared && kind == Access::kRead && address - image->begin < image->end - image->begin) return;
    fail(std::string("out of bounds: it ") + verb(kind) + std::to_string(bytes) + " bytes at " +
         memory::place(address) + at(made.caller));
  }
  if (kind == Access::kAtomic && !shared) order::atomic(address);
  shadow->visit(address, bytes, [&](Cell& cell, std::uintptr_t where) {
    check(cell, made, kind, where, shared);
    return true;
  });
}

void misaligned(const volatile void* address, std::uint64_t bytes, void* caller) {
  const auto from = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(caller) - image->begin);
  fail("misaligned: an access of " + std::to_string(bytes) + " bytes to " +
       memory::place(reinterpret_cast<std::uintptr_t>(address)) + at(from));
}

}  // namespace hc::checks
