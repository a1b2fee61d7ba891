// One wrapper for each PTX concept the kernels use; no CUDA header is needed, so NVRTC can compile
// them anywhere. Shared memory is addressed by its 32-bit window address throughout.
//
// Hopper's own instructions (TMA, mbarrier, wgmma control, setmaxnreg) need sm_90a; only kernels
// under product/hopper use them. Clusters and programmatic dependent launch need sm_90; the latter
// vanishes below. The rest runs from sm_80 on.
#pragma once

#include "common/types.cuh"

namespace ingot {

// The driver's 128-byte descriptor of a tensor in global memory (CUtensorMap), opaque here.
struct alignas(64) TensorMap {
  u64 words[16];
};

}  // namespace ingot

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

namespace ingot::ptx {

INGOT_D u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// --- fp16 pairs: the low half holds the first element ---------------------------------------

INGOT_D u32 pack_half2(float first, float second) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

INGOT_D void unpack_half2(u32 pair, float& first, float& second) {
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\n"
      "cvt.f32.f16 %0, lo;\ncvt.f32.f16 %1, hi;\n}"
      : "=f"(first), "=f"(second)
      : "r"(pair));
}

// pair · 0 + sum: NaN where an element of the pair is not finite, else sum.
INGOT_D u32 add_zero_times_half2(u32 pair, u32 sum) {
  u32 result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(pair), "r"(0), "r"(sum));
  return result;
}

INGOT_D u32 pack_bf16_pair(float first, float second) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

// Two e4m3 numbers, the first in the low byte; beyond ±448 the largest, NaN stays. From sm_89 on.
INGOT_D u32 pack_e4m3_pair(float first, float second) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
}

// --- shared memory -----------------------------------------------------------------------------

// What the launch has asked for beside the kernel's own.
INGOT_D u32 dynamic_shared_bytes() {
  u32 bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

INGOT_D float4 load_shared_vector(u32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address));
  return v;
}

INGOT_D uint4 load_shared_words(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

// Ordered only with this thread's own accesses, so that what is computed beside it may overlap it.
INGOT_D void store_shared_words(u32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w));
}

INGOT_D float load_shared(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
}
// Of any 16-bit type.
INGOT_D u16 load_shared_half(u32 address) {
  u16 bits;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address));
  return bits;
}
INGOT_D i32 load_shared_int(u32 address) {
  i32 v;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
INGOT_D int2 load_shared_int_pair(u32 address) {
  int2 v;
  asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}

INGOT_D void store_shared(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

INGOT_D void store_shared_pair(u32 address, u32 first, u32 second) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second));
}
INGOT_D void max_shared(u32 address, u32 value) {
  asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
INGOT_D void store_shared(u32 address, i32 value) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Four bytes from global to shared memory, without registers; visible to this thread after
// copy_wait_all(), to others after a barrier too.
INGOT_D void copy_word_async(u32 destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source)
               : "memory");
}
// Zero where `valid` is false (the source is then not read).
INGOT_D void copy_word_async(u32 destination, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source),
               "r"(valid ? 4 : 0)
               : "memory");
}
INGOT_D void copy_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

INGOT_D void copy_vector_async(u32 destination, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(valid ? 16 : 0)
               : "memory");
}
INGOT_D void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most kPending of this thread's committed groups are under way.
template <int kPending>
INGOT_D void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Makes this thread's earlier shared-memory accesses visible to TMA and wgmma (the async proxy).
INGOT_D void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- mma.sync (compute capability 8.0 and up) ------------------------------------------------

// Four 8×8 fp16 matrices; lane i gives the address of row i % 8 of matrix i / 8.
INGOT_D void load_matrices(u32 (&out)[4], u32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(row_address)
               : "memory");
}

// d (16×8 fp32) += a (16×16 fp16) · b (16×8 fp16).
INGOT_D void mma(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a · b in TF32, with 16 rows and 8 of k of a, and 8 columns of b. Numbers are fp32, whose low
// 13 bits are ignored.
INGOT_D void mma_tf32(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d = a · b.
INGOT_D void mma_tf32_first(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));
}

// --- barriers of the thread block ----------------------------------------------------------------

INGOT_D void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

INGOT_D void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Volatile, so that it stays where it is written relative to barriers and shared-memory loads.
INGOT_D bool warp_any(bool predicate) {
  u32 result;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nvote.sync.any.pred q, p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, q;\n}"
      : "=r"(result)
      : "r"(static_cast<u32>(predicate)));
  return result != 0;
}

// --- mbarrier ------------------------------------------------------------------------------------

INGOT_D void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

INGOT_D void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

INGOT_D void mbarrier_arrive(u32 barrier, u32 count = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
}

// Arrives at the barrier at the same offset in another thread block of the cluster. The plain form
// is meant: `.release.cluster` becomes a GPU-wide memory barrier (30% slower, measured).
INGOT_D void mbarrier_arrive_remote(u32 barrier, u32 rank, u32 count = 1) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(barrier), "r"(rank));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0], %1;" ::"r"(remote), "r"(count)
               : "memory");
}

INGOT_D void mbarrier_expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

INGOT_D void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra FINISHED;\nbra AGAIN;\nFINISHED:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- caches -------------------------------------------------------------------------------------

// Brings the 128 bytes around an address into L2.
INGOT_D void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// --- TMA -----------------------------------------------------------------------------------------

INGOT_D void tma_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

INGOT_D void tma_load(u32 destination, const TensorMap* map, u32 barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

INGOT_D void tma_load(u32 destination, const TensorMap* map, u32 barrier, int x, int y, int z,
                      int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

INGOT_D void tma_load(u32 destination, const TensorMap* map, u32 barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

INGOT_D void tma_load(u32 destination, const TensorMap* map, u32 barrier, int x, int y, int z,
                      int w, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
      : "memory");
}

// The same box lands at the same offset in every thread block of `mask`, and completes there.
// `bytes`, a multiple of 16, from and to multiples of 16.
INGOT_D void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
      : "memory");
}
INGOT_D void tma_load_multicast(u32 destination, const TensorMap* map, u32 barrier, int x, int y,
                                u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(mask)
      : "memory");
}

INGOT_D void tma_store(const TensorMap* map, u32 source, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(source), "r"(x), "r"(y)
      : "memory");
}

// Four 8×8 matrices of 16-bit elements, transposed: of matrix i, lane l holds elements 2(l%4) and
// 2(l%4) + 1 of row l/4 in v[i], and lane 8i + c gives the address of its column c, 16 bytes.
INGOT_D void store_matrices_transposed(u32 address, const u32 (&v)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
      : "memory");
}

INGOT_D void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most kPending committed stores still have to read their shared memory.
template <int kPending>
INGOT_D void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

template <int kPending>
INGOT_D void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- wgmma control -------------------------------------------------------------------------------

INGOT_D void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
INGOT_D void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
INGOT_D void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Pins registers at this point of the program: the compiler may not move their uses across it.
template <int kCount>
INGOT_D void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
INGOT_D void pin(u32 (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// The same value, but the compiler must compute again what depends on it.
INGOT_D i32 opaque(i32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// --- warpgroups, clusters, dependent launches ------------------------------------------------

template <int kRegisters>
INGOT_D void register_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
INGOT_D void register_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

INGOT_D u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Blocks of this one's cluster; 1 in a launch without clusters.
INGOT_D u32 cluster_blocks() {
  u32 blocks;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}

// Floats to an address of this block's shared memory, but in block `rank` of the cluster.
INGOT_D void store_shared_remote(u32 address, u32 rank, float4 v) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(remote), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// The same for one, whose four bytes complete at the barrier of that block: no fence is needed.
INGOT_D void store_shared_remote(u32 address, u32 barrier, u32 rank, float v) {
  u32 remote, remote_barrier;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote_barrier)
               : "r"(barrier), "r"(rank));
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
          remote),
      "f"(v), "r"(remote_barrier)
      : "memory");
}

// A word, seen by that block behind the next cluster_sync().
INGOT_D void store_shared_remote(u32 address, u32 rank, u32 word) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote), "r"(word) : "memory");
}

INGOT_D void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
// The two halves, ordering no memory but barriers that fence_mbarrier_init() has published: the
// release of cluster_sync() waits as for the whole GPU.
INGOT_D void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
INGOT_D void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// --- stores that are first to leave the L2 cache ---------------------------------------------

// Of 2, 4, 8 or a multiple of 16 bytes, aligned as these are.
template <class T>
INGOT_D void store_streamed(void* address, const T& value) {
  constexpr int kBytes = sizeof(T);
  union {
    T value;
    u16 half;
    u32 word[(kBytes + 3) / 4];
  } bits;
  bits.value = value;
  const u32* word = bits.word;
  if constexpr (kBytes % 16 == 0) {
    u64 at = reinterpret_cast<u64>(address);
    for (int i = 0; i < kBytes / 4; i += 4, at += 16) {
      asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(word[i]),
                   "r"(word[i + 1]), "r"(word[i + 2]), "r"(word[i + 3])
                   : "memory");
    }
  } else if constexpr (kBytes == 8) {
    asm volatile("st.global.cs.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(word[0]), "r"(word[1])
                 : "memory");
  } else if constexpr (kBytes == 4) {
    asm volatile("st.global.cs.b32 [%0], %1;" ::"l"(address), "r"(word[0]) : "memory");
  } else {
    static_assert(kBytes == 2);
    asm volatile("st.global.cs.b16 [%0], %1;" ::"l"(address), "h"(bits.half) : "memory");
  }
}

// --- words in global memory, between blocks of a grid ----------------------------------------
// Of 64 bits, read and written whole; nothing else is ordered by them.

INGOT_D u64 load_relaxed(const u64* word) {
  u64 value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
INGOT_D void store_relaxed(u64* word, u64 value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Programmatic dependent launch: wait for the kernels before this one in the stream, and allow the
// ones after it to be scheduled (they wait in turn before they read). No-ops in a plain launch.
INGOT_D void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
INGOT_D void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace ingot::ptx

#endif
