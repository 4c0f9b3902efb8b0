// The part of CUDA that jaxcg's kernel text uses, for g++ -std=c++17: include this, then the kernel text.
//
// Every CUDA thread is a fiber (scheduler.cc), so the text runs unchanged, one block at a time. Two things are done to
// the text beforehand (build.py): `extern __shared__ T name[];` is bound to the scheduler's storage, and a table of
// the entry points is appended.
#ifndef JAXCG_TESTS_EMULATOR_CUDA_ON_HOST_H_
#define JAXCG_TESTS_EMULATOR_CUDA_ON_HOST_H_

#include <math.h>
#include <stdio.h>
#include <string.h>

#include <type_traits>

#include "scheduler.h"

// For prelude helpers (asynchronous copies, inline PTX) that need a host twin.
#define JAXCG_ON_HOST 1

#define __global__
#define __device__
#define __host__
#define __constant__
// A section of its own, so that the scheduler can poison all arrays of the block at once.
#define __shared__ static __attribute__((section("jaxcg_static_shared")))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __builtin_assume(condition) ((void)0)

#define threadIdx (*::host::thread_index)
#define blockIdx (::host::block_index)
#define blockDim (::host::block_size)
#define gridDim (::host::grid_size)
constexpr int warpSize = 32;

// ---- barriers and warp operations -------------------------------------------------------------------------------
// The line of the call tells two barriers apart; a helper function counts as one place, wherever it is called from.

inline void __syncthreads(int line = __builtin_LINE()) { host::sync_threads(line); }

inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
  host::meet_warp(host::Operation::warp_barrier, mask, 0, 0, line);
}

namespace host {

template <class T>
inline T exchange(Operation operation, unsigned mask, T value, int source, int line) {
  static_assert(std::is_arithmetic<T>::value, "CUDA shuffles int, long, long long, float and double only");
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = meet_warp(operation, mask, bits, source, line);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

inline int lane() { return static_cast<int>(threadIdx.x & 31u); }
inline int first_of(int lane, int width) { return lane & ~(width - 1); }
inline int inside(int source, int lane, int width) {
  return source < first_of(lane, width) || source >= first_of(lane, width) + width ? lane : source;
}

}  // namespace host

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
  const int from = host::first_of(host::lane(), width) + (source & (width - 1));
  return host::exchange(host::Operation::shuffle, mask, value, from, line);
}

template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, int line = __builtin_LINE()) {
  const int lane = host::lane(), from = lane ^ lane_mask;  // Earlier segments may be read, later ones may not.
  const bool beyond = from >= host::first_of(lane, width) + width;
  return host::exchange(host::Operation::shuffle_xor, mask, value, beyond ? lane : from, line);
}

template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const int lane = host::lane(), from = host::inside(lane + static_cast<int>(delta), lane, width);
  return host::exchange(host::Operation::shuffle_down, mask, value, from, line);
}

template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const int lane = host::lane(), from = host::inside(lane - static_cast<int>(delta), lane, width);
  return host::exchange(host::Operation::shuffle_up, mask, value, from, line);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return static_cast<unsigned>(host::meet_warp(host::Operation::ballot, mask, predicate != 0, 0, line));
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, predicate, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, !predicate, line) == 0;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }

// ---- memory ------------------------------------------------------------------------------------------------------

inline void __threadfence() {}
inline void __threadfence_block() {}

// Relaxed, as on the device: ThreadSanitizer must not take an atomic addition for an ordering of other memory.
template <class T>
inline T atomicAdd(T* address, typename std::common_type<T>::type value) {
  static_assert(std::is_arithmetic<T>::value && sizeof(T) >= 4, "atomicAdd takes int, float, double and long long");
  T before, after;
  __atomic_load(address, &before, __ATOMIC_RELAXED);
  do {
    after = before + value;
  } while (!__atomic_compare_exchange(address, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}

#define JAXCG_LOAD(NAME)            \
  template <class T>                \
  inline T NAME(const T* address) { \
    return *address;                \
  }
#define JAXCG_STORE(NAME)                                                         \
  template <class T>                                                              \
  inline void NAME(T* address, const typename std::common_type<T>::type& value) { \
    *address = value;                                                             \
  }
JAXCG_LOAD(__ldg)
JAXCG_LOAD(__ldca)
JAXCG_LOAD(__ldcg)
JAXCG_LOAD(__ldcs)
JAXCG_STORE(__stcg)
JAXCG_STORE(__stcs)

#define JAXCG_VECTORS(T, NAME)                                       \
  struct alignas(2 * sizeof(T)) NAME##2 { T x, y; };                 \
  struct NAME##3 { T x, y, z; };                                     \
  struct alignas(16) NAME##4 { T x, y, z, w; };                      \
  inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }         \
  inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; } \
  inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
JAXCG_VECTORS(float, float)
JAXCG_VECTORS(double, double)
JAXCG_VECTORS(int, int)
JAXCG_VECTORS(unsigned, uint)
JAXCG_VECTORS(long long, longlong)

// ---- arithmetic --------------------------------------------------------------------------------------------------

template <class A, class B>
inline typename std::common_type<A, B>::type min(A a, B b) {
  using T = typename std::common_type<A, B>::type;
  if constexpr (std::is_floating_point<T>::value) return a != a ? T(b) : T(b) < T(a) ? T(b) : T(a);
  return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
inline typename std::common_type<A, B>::type max(A a, B b) {
  using T = typename std::common_type<A, B>::type;
  if constexpr (std::is_floating_point<T>::value) return a != a ? T(b) : T(a) < T(b) ? T(b) : T(a);
  return T(a) < T(b) ? T(b) : T(a);
}

#endif  // JAXCG_TESTS_EMULATOR_CUDA_ON_HOST_H_
