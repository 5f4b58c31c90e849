// The passes of error feedback: structures whose at<N>(i) is applied to N neighbours from element i.
#pragma once

#include "common/halves.cuh"
#include "hybridcomp/feedback.hpp"

namespace hybridcomp {
namespace {

constexpr int kThreads = 256;

// Call pass.at<N>(i) for all elements: four neighbours from i if `wide`, or one. (NVRTC takes no lambdas
// here.)
template <typename Pass>
HC_DEVICE void each(uint64_t n, bool wide, Pass& pass, Grid grid = whole_grid()) {
  const uint64_t quads = wide ? n / 4 : 0;
  for (uint64_t i = grid.thread(); i < quads; i += grid.threads()) pass.template at<4>(4 * i);
  for (uint64_t i = 4 * quads + grid.thread(); i < n; i += grid.threads()) pass.template at<1>(i);
}

template <DTypeCode D, int N>
HC_DEVICE void load(const StorageOf<D>* src, ComputeOf<D>* out) {
  const Pack<StorageOf<D>, N> pack = *reinterpret_cast<const Pack<StorageOf<D>, N>*>(src);
#pragma unroll
  for (int k = 0; k < N; ++k) out[k] = value_of<D>(pack.of[k]);
}
template <int N, typename T>
HC_DEVICE void load(const T* src, T* out) {
  load<sizeof(T) == 8 ? kFloat64 : kFloat32, N>(src, out);
}
template <int N, typename T>
HC_DEVICE void store(T* to, const T* values) {
  Pack<T, N> pack;
#pragma unroll
  for (int k = 0; k < N; ++k) pack.of[k] = values[k];
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

template <typename T>
HC_DEVICE bool quads_at(const T* p) {
  return takes_quads<sizeof(T) == 8 ? kFloat64 : kFloat32>(p);
}

// Largest magnitude that a thread has seen.
template <typename T>
struct Peak {
  typename Real<T>::Bits of = 0;
  HC_METHOD void take(T x) {
    const auto a = magnitude(x);
    of = a > of ? a : of;
  }
  HC_METHOD void tell(uint32_t* bad) const {
    if (bad && of >= Real<T>::kInfinity) atomicOr(reinterpret_cast<unsigned int*>(bad), 1u);
  }
};

template <typename T>
HC_DEVICE T* address(void* direct, const uint64_t* slot, uint64_t start) {
  T* const base = slot ? reinterpret_cast<T*>(*slot) : static_cast<T*>(direct);
  return base + start;
}

// out = x + e, or x - e.
template <DTypeCode D, bool Subtract>
struct Add {
  using T = ComputeOf<D>;
  const StorageOf<D>* x;
  const T* error;
  T* out;
  Peak<T> peak;

  template <int N>
  HC_METHOD void at(uint64_t i) {
    T a[N], e[N];
    load<D, N>(x + i, a);
    load<N>(error + i, e);
#pragma unroll
    for (int k = 0; k < N; ++k) peak.take(a[k] = Subtract ? a[k] - e[k] : a[k] + e[k]);
    store<N>(out + i, a);
  }
};
template <DTypeCode D, bool Subtract>
HC_DEVICE void add(Grid grid, const void* x, uint64_t n, void* direct, const uint64_t* slot, uint64_t start,
                   void* to, uint32_t* bad) {
  using T = ComputeOf<D>;
  Add<D, Subtract> pass{
      static_cast<const StorageOf<D>*>(x), address<T>(direct, slot, start), static_cast<T*>(to), {}};
  each(n, takes_quads<D>(pass.x) && quads_at(pass.error) && quads_at(pass.out), pass, grid);
  pass.peak.tell(bad);
}

// out = beta * momentum + rest * x, plus the error if there is one.
template <DTypeCode D>
struct Blend {
  using T = ComputeOf<D>;
  const StorageOf<D>* x;
  const T *momentum, *error;
  T* out;
  T beta, rest;
  Peak<T> peak;

  template <int N>
  HC_METHOD void at(uint64_t i) {
    T a[N], u[N];
    load<D, N>(x + i, a);
    load<N>(momentum + i, u);
#pragma unroll
    for (int k = 0; k < N; ++k) a[k] = averaged(u[k], a[k], beta, rest);
    if (error) {
      load<N>(error + i, u);
#pragma unroll
      for (int k = 0; k < N; ++k) a[k] += u[k];
    }
#pragma unroll
    for (int k = 0; k < N; ++k) peak.take(a[k]);
    store<N>(out + i, a);
  }
};
template <DTypeCode D>
HC_DEVICE void blend(Grid grid, const void* x, uint64_t n, const void* momentum,
                     typename Real<ComputeOf<D>>::Bits beta, typename Real<ComputeOf<D>>::Bits rest,
                     const uint64_t* slot, uint64_t start, void* to, uint32_t* bad) {
  using T = ComputeOf<D>;
  Blend<D> pass{static_cast<const StorageOf<D>*>(x),
                static_cast<const T*>(momentum),
                slot ? address<T>(nullptr, slot, start) : nullptr,
                static_cast<T*>(to),
                float_of(beta),
                float_of(rest),
                {}};
  each(n, takes_quads<D>(pass.x) && quads_at(pass.momentum) && quads_at(pass.error) && quads_at(pass.out),
       pass, grid);
  pass.peak.tell(bad);
}

// out = (corrected - decoded) * weight
template <typename T>
struct Lose {
  const T *corrected, *decoded;
  T* out;
  T weight;
  Peak<T> peak;

  template <int N>
  HC_METHOD void at(uint64_t i) {
    T c[N], d[N];
    load<N>(corrected + i, c);
    load<N>(decoded + i, d);
#pragma unroll
    for (int k = 0; k < N; ++k) peak.take(c[k] = lost_of(c[k], d[k], weight));
    store<N>(out + i, c);
  }
};
template <typename T>
HC_DEVICE void lose(Grid grid, const T* corrected, const T* decoded, void* direct, const uint64_t* slot,
                    uint64_t n, typename Real<T>::Bits weight, uint32_t* bad) {
  Lose<T> pass{corrected, decoded, address<T>(direct, slot, 0), float_of(weight), {}};
  each(n, quads_at(corrected) && quads_at(decoded) && quads_at(pass.out), pass, grid);
  pass.peak.tell(bad);
}

// e = beta * e + rest * (corrected - decoded) * weight
template <typename T>
struct Average {
  const T *corrected, *decoded;
  T* error;
  T weight, beta, rest;
  Peak<T> peak;

  template <int N>
  HC_METHOD void at(uint64_t i) {
    T c[N], d[N], e[N];
    load<N>(corrected + i, c);
    load<N>(decoded + i, d);
    load<N>(error + i, e);
#pragma unroll
    for (int k = 0; k < N; ++k) peak.take(e[k] = averaged(e[k], lost_of(c[k], d[k], weight), beta, rest));
    store<N>(error + i, e);
  }
};
template <typename T>
HC_DEVICE void average(Average<T> pass, uint64_t n, uint32_t* bad) {
  each(n, quads_at(pass.corrected) && quads_at(pass.decoded) && quads_at(pass.error), pass);
  pass.peak.tell(bad);
}

// next = momentum * velocity + x; out = sum + next
template <DTypeCode D>
struct Move {
  using T = ComputeOf<D>;
  const StorageOf<D>* x;
  const T *velocity, *sum;
  T *next, *out;
  T momentum;

  template <int N>
  HC_METHOD void at(uint64_t i) {
    T a[N], u[N], v[N];
    load<D, N>(x + i, a);
    load<N>(velocity + i, u);
    load<N>(sum + i, v);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      u[k] = moved(u[k], a[k], momentum);
      v[k] += u[k];
    }
    store<N>(next + i, u);
    store<N>(out + i, v);
  }
};
template <DTypeCode D>
HC_DEVICE void move(Move<D> pass, uint64_t n) {
  each(n,
       takes_quads<D>(pass.x) && quads_at(pass.velocity) && quads_at(pass.sum) && quads_at(pass.next) &&
           quads_at(pass.out),
       pass);
}

// next = momentum * velocity + x; out = x + momentum * next
template <DTypeCode D>
struct Accelerate {
  using T = ComputeOf<D>;
  const StorageOf<D>* x;
  const T* velocity;
  T *next, *out;
  T momentum;
  Peak<T> peak;

  template <int N>
  HC_METHOD void at(uint64_t i) {
    T a[N], u[N];
    load<D, N>(x + i, a);
    load<N>(velocity + i, u);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      u[k] = moved(u[k], a[k], momentum);
      peak.take(a[k] = ahead(u[k], a[k], momentum));
    }
    store<N>(next + i, u);
    store<N>(out + i, a);
  }
};
template <DTypeCode D>
HC_DEVICE void accelerate(Accelerate<D> pass, uint64_t n, uint32_t* bad) {
  each(n, takes_quads<D>(pass.x) && quads_at(pass.velocity) && quads_at(pass.next) && quads_at(pass.out),
       pass);
  pass.peak.tell(bad);
}

// decoded = corrected - decoded; next = 0 where decoded was not 0
template <typename T>
struct Mask {
  const T* corrected;
  T *decoded, *next;
  Peak<T> peak;

  template <int N>
  HC_METHOD void at(uint64_t i) {
    T c[N], d[N], u[N];
    load<N>(corrected + i, c);
    load<N>(decoded + i, d);
    load<N>(next + i, u);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      u[k] = d[k] == T(0) ? u[k] : T(0);
      peak.take(u[k]);
      peak.take(d[k] = c[k] - d[k]);
    }
    store<N>(next + i, u);
    store<N>(decoded + i, d);
  }
};
template <typename T>
HC_DEVICE void mask(Mask<T> pass, uint64_t n, uint32_t* bad) {
  each(n, quads_at(pass.corrected) && quads_at(pass.decoded) && quads_at(pass.next), pass);
  pass.peak.tell(bad);
}

template <typename T>
struct Divide {
  T* x;
  T by;

  template <int N>
  HC_METHOD void at(uint64_t i) {
    T a[N];
    load<N>(x + i, a);
#pragma unroll
    for (int k = 0; k < N; ++k) a[k] /= by;
    store<N>(x + i, a);
  }
};
template <typename T>
HC_DEVICE void divide(Grid grid, T* x, uint64_t n, typename Real<T>::Bits by) {
  Divide<T> pass{x, float_of(by)};
  each(n, quads_at(pass.x), pass, grid);
}

// Set *any if an element is not zero.
template <typename T>
struct Look {
  const T* x;
  bool found;

  template <int N>
  HC_METHOD void at(uint64_t i) {
    T a[N];
    load<N>(x + i, a);
#pragma unroll
    for (int k = 0; k < N; ++k) found |= a[k] != T(0);
  }
};
template <typename T>
HC_DEVICE void look(Look<T> pass, uint64_t n, uint32_t* any) {
  each(n, quads_at(pass.x), pass);
  const int block = __syncthreads_or(pass.found);
  if (threadIdx.x == 0 && block) atomicOr(reinterpret_cast<unsigned int*>(any), 1u);
}

// total -= mine, mine = 0, if *any.
template <typename T>
struct TakeOut {
  T *total, *mine;

  template <int N>
  HC_METHOD void at(uint64_t i) {
    T a[N], m[N];
    load<N>(total + i, a);
    load<N>(mine + i, m);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      a[k] -= m[k];
      m[k] = T(0);
    }
    store<N>(total + i, a);
    store<N>(mine + i, m);
  }
};
template <typename T>
HC_DEVICE void take_out(TakeOut<T> pass, uint64_t n, const uint32_t* any) {
  if (*any) each(n, quads_at(pass.total) && quads_at(pass.mine), pass);
}

}  // namespace
}  // namespace hybridcomp
