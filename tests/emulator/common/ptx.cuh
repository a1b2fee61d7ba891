// kernels/common/ptx.cuh, as far as sweeps use it, on the host.
#pragma once

#include "common/types.cuh"

namespace ingot {

struct alignas(64) TensorMap {
  u64 words[16];
};

}  // namespace ingot

namespace ingot::ptx {

INGOT_D u32 pack_half2(float first, float second) {
  return emulator::half_of(first) | static_cast<u32>(emulator::half_of(second)) << 16;
}
INGOT_D void unpack_half2(u32 pair, float& first, float& second) {
  first = emulator::of_half(static_cast<u16>(pair));
  second = emulator::of_half(static_cast<u16>(pair >> 16));
}
INGOT_D u32 pack_bf16_pair(float first, float second) {
  return emulator::bf16_of(first) | static_cast<u32>(emulator::bf16_of(second)) << 16;
}
INGOT_D u32 dynamic_shared_bytes() {
  return emulator::dynamic_shared_bytes;
}
INGOT_D void barrier_sync(int id, int threads) {
  emulator::wait_at_barrier(id, threads);
}
template <class T>
INGOT_D void store_streamed(void* address, const T& value) {
  std::memcpy(address, &value, sizeof(T));
}
INGOT_D u64 load_relaxed(const u64* word) {
  return *word;
}
INGOT_D void store_relaxed(u64* word, u64 value) {
  *word = value;
}

INGOT_D void prefetch_line(const void*) {}

INGOT_D void dependency_wait() {}
INGOT_D void launch_dependents() {}

// Of clusters, which the path of older devices does without, and of packing passes.
INGOT_D void copy_word_async(u32, const void*) {
  std::abort();
}
INGOT_D void copy_word_async(u32, const void*, bool) {
  std::abort();
}
INGOT_D void copy_wait_all() {
  std::abort();
}
INGOT_D void store_shared_words(u32, uint4) {
  std::abort();
}
INGOT_D uint4 load_shared_words(u32) {
  std::abort();
}
INGOT_D float load_shared(u32) {
  std::abort();
}
INGOT_D u32 shared_address(const void*) {
  std::abort();
}
INGOT_D void store_shared_remote(u32, u32, u32) {
  std::abort();
}
INGOT_D u32 cluster_rank() {
  return 0;
}
INGOT_D void cluster_sync() {}
INGOT_D void cluster_arrive() {}
INGOT_D void cluster_wait() {}

}  // namespace ingot::ptx
