// Fixed device code shared by all generated kernels. Plain C++17: NVRTC compiles it for the GPU, g++ for the tests
// (with a host header that defines the CUDA names). Names here never depend on the problem.

namespace jaxcg {

// The channels that one lane holds: channel u + 32 * t for t in [0, C), so that a warp's loads are contiguous.
template <class T, int C>
struct Lanes {
  T v[C];
};

template <class T>
struct Quad {
  T v[4];
};

__device__ __forceinline__ Quad<float> load_quad(const float* p) {
  const float4 q = *reinterpret_cast<const float4*>(p);
  return Quad<float>{{q.x, q.y, q.z, q.w}};
}

__device__ __forceinline__ Quad<double> load_quad(const double* p) {
  const double2 q = *reinterpret_cast<const double2*>(p);
  const double2 r = *reinterpret_cast<const double2*>(p + 2);
  return Quad<double>{{q.x, q.y, r.x, r.y}};
}

__device__ __forceinline__ void store_quad(float* p, float a, float b, float c, float d) {
  *reinterpret_cast<float4*>(p) = make_float4(a, b, c, d);
}

__device__ __forceinline__ void store_quad(double* p, double a, double b, double c, double d) {
  *reinterpret_cast<double2*>(p) = make_double2(a, b);
  *reinterpret_cast<double2*>(p + 2) = make_double2(c, d);
}

// Roles of one block meet here from different places in the code, which __syncthreads does not promise to allow;
// the unaligned PTX barrier does.
__device__ __forceinline__ void block_barrier() {
#ifdef __CUDA_ARCH__
  asm volatile("barrier.sync 0;" ::: "memory");
#else
  __syncthreads();
#endif
}

template <class T, int C>
__device__ __forceinline__ Lanes<T, C> zeros() {
  Lanes<T, C> r;
#pragma unroll
  for (int t = 0; t < C; ++t) r.v[t] = T(0);
  return r;
}

// `left` is the number of channels from this lane's first to the end of the block: channel t exists if 32 t < left.
// FULL: all channels of all lanes exist, no predicate.
template <bool FULL, int C, class T>
__device__ __forceinline__ Lanes<T, C> load(const T* p, int step, int left) {
  Lanes<T, C> r;
#pragma unroll
  for (int t = 0; t < C; ++t) r.v[t] = (FULL || 32 * t < left) ? __ldg(p + t * step) : T(0);
  return r;
}

// Read once by the whole grid: do not keep it in the cache.
template <bool FULL, int C, class T>
__device__ __forceinline__ Lanes<T, C> load_streaming(const T* p, int step, int left) {
  Lanes<T, C> r;
#pragma unroll
  for (int t = 0; t < C; ++t) r.v[t] = (FULL || 32 * t < left) ? __ldcs(p + t * step) : T(0);
  return r;
}

template <bool FULL, int C, class T>
__device__ __forceinline__ void store(T* p, int step, int left, const Lanes<T, C>& a) {
#pragma unroll
  for (int t = 0; t < C; ++t)
    if (FULL || 32 * t < left) __stcs(p + t * step, a.v[t]);
}

template <bool FULL, int C, class T>
__device__ __forceinline__ void add_atomically(T* p, int step, int left, const Lanes<T, C>& a) {
#pragma unroll
  for (int t = 0; t < C; ++t)
    if (FULL || 32 * t < left) atomicAdd(p + t * step, a.v[t]);
}

template <class T, int C>
__device__ __forceinline__ Lanes<T, C> mul(const Lanes<T, C>& a, const Lanes<T, C>& b) {
  Lanes<T, C> r;
#pragma unroll
  for (int t = 0; t < C; ++t) r.v[t] = a.v[t] * b.v[t];
  return r;
}

template <class T, int C>
__device__ __forceinline__ void add(Lanes<T, C>& sum, const Lanes<T, C>& a) {
#pragma unroll
  for (int t = 0; t < C; ++t) sum.v[t] += a.v[t];
}

template <class T, int C>
__device__ __forceinline__ void fma(Lanes<T, C>& sum, const Lanes<T, C>& a, const Lanes<T, C>& b) {
#pragma unroll
  for (int t = 0; t < C; ++t) sum.v[t] += a.v[t] * b.v[t];
}

template <class T, int C>
__device__ __forceinline__ void fma(Lanes<T, C>& sum, T m, const Lanes<T, C>& b) {
#pragma unroll
  for (int t = 0; t < C; ++t) sum.v[t] += m * b.v[t];
}

template <class T, int C>
__device__ __forceinline__ void dot(T& sum, const Lanes<T, C>& a, const Lanes<T, C>& b) {
#pragma unroll
  for (int t = 0; t < C; ++t) sum += a.v[t] * b.v[t];
}

// Sum each of N values over the 32 lanes; lane i ends with value i / (32 / N). Exchanging halves costs N - 1
// shuffles where a butterfly for each value would cost 5 N.
template <int N, int MASK, class T>
__device__ __forceinline__ T transpose_sum(T (&v)[N], int lane) {
  if constexpr (N == 1) {
    T s = v[0];
#pragma unroll
    for (int mask = MASK; mask > 0; mask /= 2) s += __shfl_xor_sync(0xffffffffu, s, mask);
    return s;
  } else {
    const bool up = (lane & MASK) != 0;
    T half[N / 2];
#pragma unroll
    for (int t = 0; t < N / 2; ++t) {
      const T sent = up ? v[t] : v[t + N / 2];
      const T kept = up ? v[t + N / 2] : v[t];
      half[t] = kept + __shfl_xor_sync(0xffffffffu, sent, MASK);
    }
    return transpose_sum<N / 2, MASK / 2>(half, lane);
  }
}

}  // namespace jaxcg
