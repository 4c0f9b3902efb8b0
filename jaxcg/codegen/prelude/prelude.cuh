// Fixed device code shared by all generated kernels. Plain C++17: NVRTC compiles it for the GPU, g++ for the tests
// (with a host header that defines the CUDA names). Names here never depend on the problem.

namespace jaxcg {

// The channels that one lane holds: neighbours u + t (packed), or u + 32 * t (strided), for t in [0, C).
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

// The warps of one team meet, the other teams of the block go on. The unaligned PTX barrier, since teams come here from
// different places in the code. Barrier 0 is left to the block.
__device__ __forceinline__ void team_barrier(int team, int threads) {
#ifdef __CUDA_ARCH__
  asm volatile("barrier.sync %0, %1;" ::"r"(team + 1), "r"(threads) : "memory");
#else
  host::sync_some(team + 1, threads);
#endif
}

// Launches of a call may overlap (see `early` of the handler). From here on the next one may start...
__device__ __forceinline__ void release_next_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ... and here this one waits until the launch before it has ended and all that it wrote can be seen.
__device__ __forceinline__ void await_last_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The start of a row near edge `at`: where neighbours in the list of receivers differ, if that is less than `reach`
// edges away, else `at` itself. Called by whole warps; `receivers(n)` is the receiver of edge n.
template <class Receivers>
__device__ __forceinline__ int near_row_start(const Receivers& receivers, int at, int edges, int reach, int lane) {
  if (at <= 0 || at >= edges) return at;
  const int back = at - lane, ahead = at + lane + 1;
  const bool starts_back = lane < reach && back > 0 && receivers(back - 1) != receivers(back);
  const bool starts_ahead = lane + 1 < reach && ahead < edges && receivers(ahead - 1) != receivers(ahead);
  const int to_back = __ffs(__ballot_sync(0xffffffffu, starts_back)) - 1;
  const int to_ahead = __ffs(__ballot_sync(0xffffffffu, starts_ahead));
  if (to_back >= 0 && (to_ahead == 0 || to_back <= to_ahead)) return at - to_back;
  return to_ahead > 0 ? at + to_ahead : at;
}

// Where asynchronous copies go: an address within shared memory, of 32 bits on the device.
#ifdef __CUDA_ARCH__
typedef unsigned SharedAddress;
__device__ __forceinline__ SharedAddress shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
#else
typedef unsigned char* SharedAddress;
inline SharedAddress shared_address(void* p) { return static_cast<unsigned char*>(p); }
#endif

template <class T, int C>
__device__ __forceinline__ Lanes<T, C> zeros() {
  Lanes<T, C> r;
#pragma unroll
  for (int t = 0; t < C; ++t) r.v[t] = T(0);
  return r;
}

// Where lane values live in memory. Packed: the C channels of a lane side by side, moved by one vector access.
// Strided: channel t at t * step, where multiplicities or offsets forbid that. `left` is the number of
// channels from this lane's first to the end of the block: channel t exists if 32 t < left. FULL: all exist.
template <bool PACKED, bool FULL, int C>
struct Access {};

template <class T, int C>
struct alignas(sizeof(T) * C <= 16 ? sizeof(T) * C : 16) Pack {
  T v[C];
};

// Store what nobody reads soon: the L2 may drop it first.
template <class T, int C>
__device__ __forceinline__ void store_once(T* p, const Pack<T, C>& a) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(a) == 16) {
    __stcs(reinterpret_cast<int4*>(p), *reinterpret_cast<const int4*>(&a));
    return;
  } else if constexpr (sizeof(a) == 8) {
    __stcs(reinterpret_cast<int2*>(p), *reinterpret_cast<const int2*>(&a));
    return;
  } else if constexpr (sizeof(a) == 4) {
    __stcs(reinterpret_cast<int*>(p), *reinterpret_cast<const int*>(&a));
    return;
  }
#endif
  *reinterpret_cast<Pack<T, C>*>(p) = a;
}

template <bool FULL, int C>
struct Access<true, FULL, C> {
  template <class T>
  __device__ __forceinline__ static Lanes<T, C> load(const T* p, int, int) {
    const Pack<T, C> q = *reinterpret_cast<const Pack<T, C>*>(p);
    Lanes<T, C> r;
#pragma unroll
    for (int t = 0; t < C; ++t) r.v[t] = q.v[t];
    return r;
  }
  template <class T>
  __device__ __forceinline__ static void store(T* p, int, int, const Lanes<T, C>& a) {
    Pack<T, C> q;
#pragma unroll
    for (int t = 0; t < C; ++t) q.v[t] = a.v[t];
    *reinterpret_cast<Pack<T, C>*>(p) = q;
  }
  template <class T>
  __device__ __forceinline__ static void store_once(T* p, int, int, const Lanes<T, C>& a) {
    Pack<T, C> q;
#pragma unroll
    for (int t = 0; t < C; ++t) q.v[t] = a.v[t];
    jaxcg::store_once(p, q);
  }
};

template <bool FULL, int C>
struct Access<false, FULL, C> {
  template <class T>
  __device__ __forceinline__ static Lanes<T, C> load(const T* p, int step, int left) {
    Lanes<T, C> r;
#pragma unroll
    for (int t = 0; t < C; ++t) r.v[t] = (FULL || 32 * t < left) ? p[t * step] : T(0);
    return r;
  }
  template <class T>
  __device__ __forceinline__ static void store(T* p, int step, int left, const Lanes<T, C>& a) {
#pragma unroll
    for (int t = 0; t < C; ++t)
      if (FULL || 32 * t < left) p[t * step] = a.v[t];
  }
  template <class T>
  __device__ __forceinline__ static void store_once(T* p, int step, int left, const Lanes<T, C>& a) {
#pragma unroll
    for (int t = 0; t < C; ++t)
      if (FULL || 32 * t < left) jaxcg::store_once(p + t * step, Pack<T, 1>{{a.v[t]}});
  }
};

// All components of a block in layout mul_ir, for lanes whose C channels are neighbours: they hold one run of memory.
template <class T, int C, class... More>
__device__ __forceinline__ void load_block(const T* p, Lanes<T, C>& first, More&... more) {
  constexpr int N = 1 + sizeof...(more);
  Lanes<T, C>* const parts[N] = {&first, &more...};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const Pack<T, C> q = *reinterpret_cast<const Pack<T, C>*>(p + C * n);
#pragma unroll
    for (int t = 0; t < C; ++t) parts[(C * n + t) % N]->v[(C * n + t) / N] = q.v[t];
  }
}

template <class T, int C, class... More>
__device__ __forceinline__ void store_block(T* p, const Lanes<T, C>& first, const More&... more) {
  constexpr int N = 1 + sizeof...(more);
  const Lanes<T, C>* const parts[N] = {&first, &more...};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    Pack<T, C> q;
#pragma unroll
    for (int t = 0; t < C; ++t) q.v[t] = parts[(C * n + t) % N]->v[(C * n + t) / N];
    *reinterpret_cast<Pack<T, C>*>(p + C * n) = q;
  }
}

// Add N neighbours to memory that other warps add to. One vector reduction where the hardware has it (sm_90).
template <int N>
__device__ __forceinline__ void add_atomically(float* p, const float* a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (N == 4) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(a[0]), "f"(a[1]), "f"(a[2]), "f"(a[3])
                 : "memory");
    return;
  } else if constexpr (N == 2) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(a[0]), "f"(a[1]) : "memory");
    return;
  }
#endif
#pragma unroll
  for (int t = 0; t < N; ++t) atomicAdd(p + t, a[t]);
}

template <int N>
__device__ __forceinline__ void add_atomically(double* p, const double* a) {
#pragma unroll
  for (int t = 0; t < N; ++t) atomicAdd(p + t, a[t]);
}

// Move a run of `count` elements from shared to global memory, whole warp, W elements a lane at a time: added
// atomically, or stored where nobody else writes.
template <bool EXCLUSIVE, int W, class T>
__device__ __forceinline__ void move_run(T* global, const T* shared, int count, int lane) {
  for (int k = W * lane; k < count; k += 32 * W) {
    const Pack<T, W> q = *reinterpret_cast<const Pack<T, W>*>(shared + k);
    if constexpr (EXCLUSIVE)
      *reinterpret_cast<Pack<T, W>*>(global + k) = q;
    else
      add_atomically<W>(global + k, q.v);
  }
}

// Zeros to a run of `count` elements of global memory, whole warp.
template <int W, class T>
__device__ __forceinline__ void zero_run(T* global, int count, int lane) {
  for (int k = W * lane; k < count; k += 32 * W) *reinterpret_cast<Pack<T, W>*>(global + k) = Pack<T, W>{};
}

// Asynchronous copies from global to shared memory, in groups: `wait<N>` returns when all but the last N groups of
// this thread are there; another thread's copies are there after its wait and a barrier. On the host a copy happens
// when it is waited for, so that a missing wait shows.
struct CopyQueue {
#ifdef __CUDA_ARCH__
  template <int BYTES, int TO, int FROM, bool ONCE>
  __device__ __forceinline__ void copy(SharedAddress to, const void* from, bool exists) {
    const int bytes = exists ? BYTES : 0;  // the rest is filled with zeros
#if __CUDA_ARCH__ >= 900
    constexpr bool HINT = ONCE;
#else
    constexpr bool HINT = false;
#endif
    // The policy that `createpolicy.fractional.L2::evict_first` makes; as a constant it needs no registers.
    if constexpr (BYTES == 16 && HINT)
      asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0 + %3], [%1 + %4], 16, %2, %5;" ::"r"(to), "l"(from),
                   "r"(bytes), "n"(TO), "n"(FROM), "l"(0x12F0000000000000ull)
                   : "memory");
    else if constexpr (BYTES == 16)
      asm volatile("cp.async.cg.shared.global [%0 + %3], [%1 + %4], 16, %2;" ::"r"(to), "l"(from), "r"(bytes), "n"(TO),
                   "n"(FROM)
                   : "memory");
    else
      asm volatile("cp.async.ca.shared.global [%0 + %3], [%1 + %4], %5, %2;" ::"r"(to), "l"(from), "r"(bytes), "n"(TO),
                   "n"(FROM), "n"(BYTES)
                   : "memory");
  }
  __device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  template <int N>
  __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
  }
#else
  struct Copy {
    unsigned char* to;
    const unsigned char* from;
    int bytes, exists, group;
  };
  Copy pending[1024];
  int count = 0, group = 0;
  template <int BYTES, int TO, int FROM, bool ONCE>
  void copy(SharedAddress to, const void* from, bool exists) {
    pending[count++] = Copy{to + TO, static_cast<const unsigned char*>(from) + FROM, BYTES, exists, group};
  }
  void commit() { ++group; }
  template <int N>
  void wait() {
    int kept = 0;
    for (int n = 0; n < count; ++n) {
      if (pending[n].group >= group - N) {
        pending[kept++] = pending[n];
        continue;
      }
      for (int b = 0; b < pending[n].bytes; ++b) pending[n].to[b] = pending[n].exists ? pending[n].from[b] : 0;
    }
    count = kept;
  }
#endif
};

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

// Kahan's sum: `lost` is by how much the sum so far is too large.
template <class T>
__device__ __forceinline__ void add_compensated(T& sum, T a, T& lost) {
  const T next = a - lost, total = sum + next;
  lost = (total - sum) - next;
  sum = total;
}

template <class T, int C>
__device__ __forceinline__ void add_compensated(Lanes<T, C>& sum, const Lanes<T, C>& a, Lanes<T, C>& lost) {
#pragma unroll
  for (int t = 0; t < C; ++t) add_compensated(sum.v[t], a.v[t], lost.v[t]);
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

// The same for 8, 16 or 32 values through shared memory, which costs a third less: each lane writes a row of N values
// and then adds up a column, or a part of one. Rows are 16 bytes further apart than long and parts N % 32 elements
// more, so that lanes hit different banks. Lane j < N ends with value j; `place` holds 32 * (N + 5) elements of this
// warp's own.
template <int N, class T>
__device__ __forceinline__ T sum_lanes(T* place, const T (&v)[N], int lane) {
  constexpr int ROW = N + 16 / sizeof(T), PART = N * ROW + N % 32;
  T* const row = place + lane / N * PART + lane % N * ROW;
#pragma unroll
  for (int q = 0; q < N; q += 4) store_quad(row + q, v[q], v[q + 1], v[q + 2], v[q + 3]);
  __syncwarp();
  const T* const column = place + lane / N * PART + lane % N;
  T sum[2] = {T(0), T(0)};
#pragma unroll
  for (int r = 0; r < N; ++r) sum[r % 2] += column[r * ROW];
  T total = sum[0] + sum[1];
#pragma unroll
  for (int mask = N; mask < 32; mask *= 2) total += __shfl_xor_sync(0xffffffffu, total, mask);
  return total;
}

template <class T, int N>
__device__ __forceinline__ void add_pack(Pack<T, N>& sum, const T* p) {
  const Pack<T, N> q = *reinterpret_cast<const Pack<T, N>*>(p);
#pragma unroll
  for (int t = 0; t < N; ++t) sum.v[t] += q.v[t];
}

// The start of the run of equal marks that ends before `at`, and the end of the one that goes on there. Whole warps.
__device__ __forceinline__ int run_start(const int* marks, int at, int mark, int lane) {
  for (;; at -= 32) {
    const int other = __ffs(__ballot_sync(0xffffffffu, at <= lane || marks[at - 1 - lane] != mark));
    if (other > 0) return at - other + 1;
  }
}

__device__ __forceinline__ int run_end(const int* marks, int at, int count, int mark, int lane) {
  for (;; at += 32) {
    const int other = __ffs(__ballot_sync(0xffffffffu, at + lane >= count || marks[at + lane] != mark));
    if (other > 0) return at + other - 1;
  }
}

// sum + every `step`-th of `count` rows from `first` on, in order.
template <int WIDTH, bool COMPENSATED, class T, int N>
__device__ __forceinline__ Pack<T, N> sum_rows(Pack<T, N> sum, const T* rows, int first, int count, int step) {
  Pack<T, N> lost = {};
  const T* from = rows + WIDTH * first;
#pragma unroll 4
  for (int h = first; h < count; h += step, from += WIDTH * step) {
    if constexpr (COMPENSATED) {
      const Pack<T, N> q = *reinterpret_cast<const Pack<T, N>*>(from);
      for (int t = 0; t < N; ++t) add_compensated(sum.v[t], q.v[t], lost.v[t]);
    } else {
      add_pack(sum, from);
    }
  }
  return sum;
}

// z += sum of `count` rows, in an order that depends on nothing else, for part `part` of `count` of some columns: unit n
// of them is the N elements from N * column(n) on. Whole blocks, with room for a pack a thread.
template <int N, int WIDTH, bool COMPENSATED, class T, class Column>
__device__ __forceinline__ void add_rows(
    T* z, const T* rows, int count, int units, int part, void* room, const Column& column
) {
  // With more rows than this a block shares them out, else only columns: one thread would read them one by one.
  constexpr int MANY = 32, COLUMNS = 8;
  const int begin = static_cast<int>(static_cast<long long>(units) * part / count);
  const int end = static_cast<int>(static_cast<long long>(units) * (part + 1) / count);
  Pack<T, N>* const sums = reinterpret_cast<Pack<T, N>*>(z);
  if (count <= MANY) {
#pragma unroll 4
    for (int n = begin + threadIdx.x; n < end; n += blockDim.x) {
      const int c = column(n);
      sums[c] = sum_rows<WIDTH, COMPENSATED>(sums[c], rows + N * c, 0, count, 1);
    }
    return;
  }
  Pack<T, N>* const partial = static_cast<Pack<T, N>*>(room);
  const int place = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS, groups = blockDim.x / COLUMNS;
  for (int first = begin; first < end; first += COLUMNS) {
    const bool exists = first + place < end;
    const int c = exists ? column(first + place) : 0;
    if (exists)
      partial[threadIdx.x] = sum_rows<WIDTH, COMPENSATED>(Pack<T, N>{}, rows + N * c, group, count, groups);
    __syncthreads();
    if (exists && group == 0)
      sums[c] = sum_rows<COLUMNS * N, COMPENSATED>(sums[c], partial[place].v, 0, groups, 1);
    __syncthreads();
  }
}

}  // namespace jaxcg
