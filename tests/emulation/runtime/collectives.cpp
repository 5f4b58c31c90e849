// Barriers and the exchanges of a warp, and why threads wait for ever.
#include <algorithm>

#include "checks.hpp"
#include "state.hpp"

namespace hc {

std::string place_of(const hc_site* site) {
  std::string file = site->file;
  file.erase(0, file.rfind('/') + 1);
  return std::string(site->what) + " at " + file + ":" + std::to_string(site->line);
}

namespace {

std::string hexadecimal(std::uint32_t mask) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", mask);
  return text;
}

// Result of a shuffle where CUDA leaves it undefined: a value that no test expects, another for each seed.
std::uint64_t undefined_value() { return 0xDEADBEEFDEADBEEFu ^ (launch.seed * 0x0101010101010101u); }

std::uint64_t shuffled(const Thread* warp, const Thread& self, std::uint32_t lane) {
  const std::uint32_t width = self.width, first = lane & ~(width - 1), last = first + width - 1;
  std::uint32_t source = lane;
  switch (self.op) {
    case HC_SHFL:
      source = first | (self.argument & (width - 1));
      break;
    case HC_SHFL_UP:
      if (lane - first >= self.argument) source = lane - self.argument;
      break;
    case HC_SHFL_DOWN:
      if (self.argument <= last - lane) source = lane + self.argument;
      break;
    default:  // as the hardware: a lane of a later segment is out of range, one of an earlier is not
      if ((lane ^ self.argument) <= last) source = lane ^ self.argument;
  }
  return self.mask >> source & 1 ? warp[source].value : undefined_value();
}

std::uint64_t reduced(int op, std::uint64_t a, std::uint64_t b) {
  const auto x = static_cast<std::uint32_t>(a), y = static_cast<std::uint32_t>(b);
  const auto sx = static_cast<std::int32_t>(x), sy = static_cast<std::int32_t>(y);
  switch (op) {
    case HC_ADD:
      return x + y;
    case HC_MIN:
      return std::min(x, y);
    case HC_MAX:
      return std::max(x, y);
    case HC_MIN_SIGNED:
      return static_cast<std::uint32_t>(std::min(sx, sy));
    case HC_MAX_SIGNED:
      return static_cast<std::uint32_t>(std::max(sx, sy));
    case HC_AND:
      return x & y;
    case HC_OR:
      return x | y;
    default:
      return x ^ y;
  }
}

// Every lane of `mask` is here: give each its result.
void exchange(Thread* warp, int op, std::uint32_t mask) {
  std::uint32_t set = 0;  // lanes whose value is not zero
  const Thread& first = warp[__builtin_ctz(mask)];
  std::uint64_t all = first.value;
  bool alike = true;
  for (std::uint32_t lane = 0; lane < kWarp; ++lane) {
    if (!(mask >> lane & 1)) continue;
    if (warp[lane].value) set |= 1u << lane;
    alike = alike && warp[lane].value == first.value;
    if (op >= HC_ADD && &warp[lane] != &first) all = reduced(op, all, warp[lane].value);
  }
  for (std::uint32_t lane = 0; lane < kWarp; ++lane) {
    if (!(mask >> lane & 1)) continue;
    Thread& self = warp[lane];
    switch (op) {
      case HC_SYNC:
        break;
      case HC_SHFL:
      case HC_SHFL_UP:
      case HC_SHFL_DOWN:
      case HC_SHFL_XOR:
        self.result = shuffled(warp, self, lane);
        break;
      case HC_BALLOT:
        self.result = set;
        break;
      case HC_ANY:
        self.result = set != 0;
        break;
      case HC_ALL:
        self.result = set == mask;
        break;
      case HC_MATCH_ANY:
        self.result = 0;
        for (std::uint32_t other = 0; other < kWarp; ++other) {
          if ((mask >> other & 1) && warp[other].value == self.value) self.result |= 1u << other;
        }
        break;
      case HC_MATCH_ALL:
        self.result = alike ? mask : 0;
        break;
      default:
        self.result = all;
    }
  }
}

bool complete(const Thread* warp, const Thread& self) {
  for (std::uint32_t lane = 0; lane < kWarp; ++lane) {
    if (!(self.mask >> lane & 1)) continue;
    if (warp[lane].site != self.site || warp[lane].mask != self.mask) return false;
  }
  return true;
}

// Release threads of [first, first + count) whose bit is in `mask`, in the order that the seed asks for.
void release(std::uint32_t first, std::uint32_t count, std::uint32_t mask) {
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t at = launch.seed == 1 ? count - 1 - i : i;
    if (mask >> (at % kWarp) & 1) make_ready(first + at);
  }
}

std::string whereabouts(const Thread& thread) {
  const std::string who = "thread " + std::to_string(thread.index);
  if (thread.wait == Wait::kExited) return who + " has exited";
  std::string text = who + " waits in " + place_of(thread.site);
  if (thread.wait == Wait::kWarp) text += " with mask " + hexadecimal(thread.mask);
  return text;
}

void explain_warp(const Thread& self) {
  const Thread* warp = &launch.all[self.index / kWarp * kWarp];
  for (std::uint32_t lane = 0; lane < kWarp; ++lane) {
    const Thread& other = warp[lane];
    if (!(self.mask >> lane & 1)) continue;
    if (other.wait == Wait::kWarp && other.site == self.site && other.mask == self.mask) continue;
    fail_of(self, place_of(self.site) + ": its mask " + hexadecimal(self.mask) + " names lane " +
                      std::to_string(lane) + ", but " + whereabouts(other));
  }
}

void explain_barrier(const Thread& self) {
  for (std::uint32_t i = 0; i < launch.threads; ++i) {
    const Thread& other = launch.all[i];
    if (other.wait == Wait::kBarrier && other.site == self.site) continue;
    fail_of(self, "divergent barrier: it waits in " + place_of(self.site) + ", but " + whereabouts(other));
  }
}

}  // namespace

void explain_deadlock() {
  // A collective that cannot end explains more than the barrier that others wait at meanwhile.
  for (std::uint32_t i = 0; i < launch.threads; ++i) {
    if (launch.all[i].wait == Wait::kWarp) explain_warp(launch.all[i]);
  }
  for (std::uint32_t i = 0; i < launch.threads; ++i) {
    if (launch.all[i].wait == Wait::kBarrier) explain_barrier(launch.all[i]);
  }
  fail("deadlock");
}

}  // namespace hc

using namespace hc;

extern "C" int hc_barrier(const hc_site* site, int op, int predicate) {
  Thread& self = launch.running_thread();
  self.wait = Wait::kBarrier;
  self.site = site;
  launch.predicates += predicate != 0;
  if (++launch.at_barrier == launch.threads) {
    for (std::uint32_t i = 0; i < launch.threads; ++i) {
      if (launch.all[i].site != site) explain_deadlock();
    }
    for (std::uint32_t i = 0; i < launch.threads; ++i) launch.all[i].result = launch.predicates;
    launch.at_barrier = launch.predicates = 0;
    checks::barrier();
    release(0, launch.threads, ~0u);
  }
  suspend();
  const auto count = static_cast<std::uint32_t>(self.result);
  if (op == HC_BARRIER_OR) return count != 0;
  if (op == HC_BARRIER_AND) return count == launch.threads;
  return static_cast<int>(count);
}

extern "C" std::uint64_t hc_collective(const hc_site* site, int op, std::uint32_t mask, std::uint64_t value,
                                       std::uint32_t argument, std::uint32_t width) {
  Thread& self = launch.running_thread();
  const std::uint32_t warp = self.index / kWarp, lane = self.index % kWarp;
  self.site = site;
  if (!(mask >> lane & 1)) {
    fail(place_of(site) + ": its mask " + hexadecimal(mask) + " does not name the calling lane " +
         std::to_string(lane));
  }
  if (width == 0 || width > kWarp || (width & (width - 1)) != 0) {
    fail(place_of(site) + ": its width is " + std::to_string(width));
  }
  if (op >= HC_SHFL_UP && op <= HC_SHFL_XOR && argument >= kWarp) {
    fail(place_of(site) + ": it asks for " + std::to_string(argument) + " lanes, which CUDA does not define");
  }
  self.wait = Wait::kWarp;
  self.op = op;
  self.mask = mask;
  self.value = value;
  self.argument = argument;
  self.width = width;
  launch.warp_waiting[warp] |= 1u << lane;
  Thread* lanes = &launch.all[warp * kWarp];
  if ((launch.warp_waiting[warp] & mask) == mask && complete(lanes, self)) {
    exchange(lanes, op, mask);
    if (op == HC_SYNC) checks::warp_barrier(warp, mask);
    launch.warp_waiting[warp] &= ~mask;
    release(warp * kWarp, kWarp, mask);
  }
  suspend();
  return self.result;
}

extern "C" std::uint32_t hc_active_mask() {
  const std::uint32_t first = launch.current / kWarp * kWarp;
  std::uint32_t mask = 0;
  for (std::uint32_t lane = 0; lane < kWarp; ++lane) {
    if (launch.all[first + lane].wait != Wait::kExited) mask |= 1u << lane;
  }
  return mask;
}

extern "C" void hc_trap(const hc_site* site) { fail(place_of(site)); }
