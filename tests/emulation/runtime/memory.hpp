// The memory that a kernel may touch: registered global buffers and the shared arrays of the running block.
#pragma once

#include <cstdint>
#include <string>

#include "shadow.hpp"

namespace hc::memory {

struct Buffer {
  std::uintptr_t begin = 0;
  std::uint64_t bytes = 0;
  std::string name;
  Shadow shadow;
};

struct SharedArray {
  const void* key = nullptr;
  std::string name;
  std::uintptr_t begin = 0;
  std::uint64_t bytes = 0;
  std::uint64_t block = 0;  // number of the last block that asked for it
};

void launch_begins();
void block_begins();
void block_ends();

// The buffer or live array that holds the address, or null.
Buffer* buffer_at(std::uintptr_t address);
const SharedArray* shared_at(std::uintptr_t address);
bool in_shared_memory(std::uintptr_t address);
Shadow& shared_shadow();

// "shared array 'tile' + 12 (of 4096 bytes)": for messages, also for addresses a little outside.
std::string place(std::uintptr_t address);

}  // namespace hc::memory
