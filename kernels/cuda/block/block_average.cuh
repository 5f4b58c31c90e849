// Error feedback of the form `loco` in one pass, for blocks of 32, 64 and 128 of float and shorter types: the
// message of x + e, and the moving average e of messages' errors, an int8 message of blocks of 128 without
// its prefix. Eight lanes have a block of the state, and the one, two or four blocks of the message in it.
#pragma once

#include "block/block_plain.cuh"
#include "hybridcomp/feedback.hpp"

namespace hybridcomp {
namespace {

constexpr uint32_t kStateBlock = 128;
constexpr float kStateLimit = 127.0f;
constexpr uint32_t kStateLanes = 8;

struct State {
  float* scales;
  uint8_t* integers;
};
struct Average {
  float beta, rest;
  uint32_t* bad;  // set if a value of the state is not finite

  HC_METHOD float of(float error, float corrected, float decoded) const {
    return averaged(error, lost_of(corrected, decoded, 1.0f), beta, rest);
  }
  HC_METHOD void see(uint32_t peak) const {
    if (peak >= Real<float>::kInfinity) atomicOr(reinterpret_cast<unsigned int*>(bad), 1u);
  }
};

HC_DEVICE void state_quad(const State& state, uint64_t i, float scale, float* out) {
  const uint32_t raised = *reinterpret_cast<const uint32_t*>(state.integers + i) ^ 0x80808080u;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    out[k] = (float_of(0x4B000000u | __byte_perm(raised, 0, 0x4440 + k)) - 8388736.0f) * scale;
}

HC_DEVICE void put_state_quad(const State& state, uint64_t i, float inverse, const float* e) {
  uint32_t q[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) q[k] = static_cast<uint32_t>(quantized(e[k], inverse));
  *reinterpret_cast<uint32_t*>(state.integers + i) = inverse == 0.0f ? 0 : low_bytes(q);
}

// Encode the elements after the last whole block of the state, from `first`, by one warp.
template <DTypeCode D>
HC_DEVICE void encode_average_tail(const Plain<D>& x, uint64_t n, uint64_t first, uint32_t block,
                                   const State& state, const State& fresh, const Average& average,
                                   float* scales, uint8_t* packed) {
  constexpr int kEach = kStateBlock / 32;
  HC_SHARED(uint8_t, fields, kStateBlock);
  const uint32_t lane = threadIdx.x & 31, m = static_cast<uint32_t>(n - first);
  const uint64_t place = first / kStateBlock, before = first / block;
  const float stored = state.scales[place];
  float c[kEach], e[kEach];
  uint32_t peaks[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const uint32_t i = lane + 32 * k;
    c[k] = e[k] = 0.0f;
    if (i < m) {
      const int32_t q = static_cast<int32_t>(state.integers[first + i] ^ 0x80u) - 0x80;
      e[k] = static_cast<float>(q) * stored;
      c[k] = x.at(first + i) + e[k];
    }
    peaks[k] = peak_over_lanes<float>(magnitude(c[k]), 32);
  }
  uint32_t peak = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const uint32_t i = lane + 32 * k, b = 32 * k / block;
    uint32_t largest = 0;
#pragma unroll
    for (int other = 0; other < kEach; ++other)
      if (32 * other / block == b && peaks[other] > largest) largest = peaks[other];
    const BlockScale<float> scale = block_scale<float>(largest, static_cast<float>(kLimit));
    if (lane == 0 && 32 * k % block == 0 && 32u * k < m) scales[before + b] = scale.stored;
    const uint32_t field =
        scale.inverse == 0.0f ? 0 : static_cast<uint32_t>(quantized(c[k], scale.inverse)) & kField;
    fields[i] = static_cast<uint8_t>(field);
    if (i < m) {
      e[k] = average.of(e[k], c[k], static_cast<float>(signed_part(field)) * scale.stored);
      peak = magnitude(e[k]) > peak ? magnitude(e[k]) : peak;
    }
  }
  __syncwarp();
  for (uint32_t from = 0; from < m; from += block) {
    const uint32_t count = m - from < block ? m - from : block;
    const uint32_t bytes = static_cast<uint32_t>(bytes_of(count));
    uint8_t* const to = packed + (before + from / block) * (block / kParts);
    for (uint32_t j = lane; j < bytes; j += 32) {
      uint32_t byte = 0;
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        if (j + part * bytes < count)
          byte |= static_cast<uint32_t>(fields[from + j + part * bytes]) << (part * kBits);
      to[j] = static_cast<uint8_t>(byte);
    }
  }
  peak = peak_over_lanes<float>(peak, 32);
  const BlockScale<float> scale = block_scale<float>(peak, kStateLimit);
  if (lane == 0) {
    fresh.scales[place] = scale.stored;
    average.see(peak);
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const uint32_t i = lane + 32 * k;
    if (i >= m) continue;
    const uint32_t q = static_cast<uint32_t>(quantized(e[k], scale.inverse));
    fresh.integers[first + i] = static_cast<uint8_t>(scale.inverse == 0.0f ? 0 : q);
  }
}

template <DTypeCode D>
HC_DEVICE void encode_average(const Plain<D>& x, uint64_t n, uint32_t block, const State& state,
                              const State& fresh, const Average& average, float* scales, uint8_t* packed) {
  const Place<4> place(block);
  const uint64_t blocks = n / kStateBlock, whole = blocks * (kStateBlock / block);
  for (uint64_t begin = place.first(); begin < whole; begin += place.step()) {
    const uint64_t own = place.own(begin);
    const uint64_t b = own < whole ? own : whole - 1;
    const uint64_t at = b * block + 4 * place.lane;
    const float stored = state.scales[at / kStateBlock];
    float c[4][4], e[4][4];
    uint32_t peak = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x.quad(at + i * place.stride, c[i]);
      state_quad(state, at + i * place.stride, stored, e[i]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        c[i][k] += e[i][k];
        peak = magnitude(c[i][k]) > peak ? magnitude(c[i][k]) : peak;
      }
    }
    peak = peak_over_lanes<float>(peak, place.lanes);
    const BlockScale<float> scale = block_scale<float>(peak, static_cast<float>(kLimit));
    uint32_t* const to = reinterpret_cast<uint32_t*>(packed + b * (block / kParts)) + place.lane;
    if (own < whole && place.lane == 0) scales[b] = scale.stored;
    peak = 0;
#pragma unroll
    for (int w = 0; w < kWords<4>; ++w) {
      const uint32_t word = word_of<4>(c, w, scale.inverse);
      if (own < whole) to[w * place.lanes] = word;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int i = w + part * kWords<4>;
        float decoded[4];
        unpack(word, part, decoded);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          e[i][k] = average.of(e[i][k], c[i][k], decoded[k] * scale.stored);
          peak = magnitude(e[i][k]) > peak ? magnitude(e[i][k]) : peak;
        }
      }
    }
    peak = peak_over_lanes<float>(peak, kStateLanes);
    if (own >= whole) continue;
    const BlockScale<float> next = block_scale<float>(peak, kStateLimit);
    if (threadIdx.x % kStateLanes == 0) {
      fresh.scales[at / kStateBlock] = next.stored;
      average.see(peak);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) put_state_quad(fresh, at + i * place.stride, next.inverse, e[i]);
  }
  if (n % kStateBlock && global_thread() / 32 + 1 == global_threads() / 32)
    encode_average_tail(x, n, blocks * kStateBlock, block, state, fresh, average, scales, packed);
}

}  // namespace
}  // namespace hybridcomp
