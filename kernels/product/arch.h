// What is known of a GPU by its compute capability alone: for planning and predicting. Plain C++,
// no CUDA header. To add an architecture, add a row and name it in arch_of().
#pragma once

#include <cstddef>

namespace ingot {

inline constexpr int kOldestSm = 80;  // that is served

struct ArchSpec {
  // Where no GPU can be asked.
  int multiprocessors = 108;
  double bandwidth = 4.2e12, cache_bytes = 50e6;  // bytes a second; of the last-level cache
  int shared_bytes = 99 * 1024;  // that a thread block may have, by the programming guide

  bool hopper_kernels = false;    // wgmma and TMA as product/hopper takes them; code for "sm_…a"
  bool dependent_launch = false;  // programmatic, of a kernel before its predecessor ends
  // Three fp16 products take the time of one in fp32 where tensor cores are three times as fast. By
  // the datasheets they are 8 to 16 times as fast in these; in the others 4 times at best, and only
  // 2 in cards for games.
  bool fast_tensor_cores = false;

  // Sustained, of one multiprocessor, in operations a second; used for predictions alone.
  struct Rates {
    double fp32, tf32, half;
    double portable;                         // our fp32 product, by the portable kernels
    double split = 0, scaled = 0, high = 0;  // ours for Hopper: fp32, tf32, high
  } rates;

  // For the choice between the portable product and the library's.
  struct PortableProduct {
    int multiprocessors = 132;   // that were measured
    double chunk_us = 1.9;       // 32 of K in all blocks of a multiprocessor
    double lone_chunk_us = 1.2;  // in one block of four warps, alone on it
    double library_tflops = 45, bytes_per_us = 3.8e6;
  } portable{};
};

// A100, Orin: from datasheets; none was tried.
inline constexpr ArchSpec kAmpere = {.bandwidth = 1.6e12,
                                     .cache_bytes = 40e6,
                                     .shared_bytes = 163 * 1024,
                                     .fast_tensor_cores = true,
                                     .rates = {.fp32 = 19e12 / 108,
                                               .tf32 = 130e12 / 108,
                                               .half = 250e12 / 108,
                                               .portable = 65e12 / 108},
                                     .portable = {.multiprocessors = 108,
                                                  .chunk_us = 2.9,
                                                  .lone_chunk_us = 1.8,
                                                  .library_tflops = 18,
                                                  .bytes_per_us = 1.4e6}};

// 8.6, 8.9: small shared memory, slow tensor cores.
inline constexpr ArchSpec kAda = {.bandwidth = kAmpere.bandwidth,
                                  .cache_bytes = kAmpere.cache_bytes,
                                  .rates = kAmpere.rates,
                                  .portable = kAmpere.portable};

// Measured on an H200.
inline constexpr ArchSpec kHopper = {.multiprocessors = 132,
                                     .shared_bytes = 227 * 1024,
                                     .hopper_kernels = true,
                                     .dependent_launch = true,
                                     .fast_tensor_cores = true,
                                     .rates = {.fp32 = 50e12 / 132,
                                               .tf32 = 390e12 / 132,
                                               .half = 700e12 / 132,
                                               .portable = 145e12 / 132,
                                               .split = 245e12 / 132,
                                               .scaled = 550e12 / 132,
                                               .high = 365e12 / 132}};

// B200, B300: from datasheets; none was tried.
inline constexpr ArchSpec kBlackwell = {.shared_bytes = 227 * 1024,
                                        .dependent_launch = true,
                                        .fast_tensor_cores = true,
                                        .rates = {.fp32 = 70e12 / 148,
                                                  .tf32 = 900e12 / 148,
                                                  .half = 1500e12 / 148,
                                                  .portable = 150e12 / 148}};

// The others of its generation, and what comes after it.
inline constexpr ArchSpec kThor = {
    .shared_bytes = 227 * 1024, .dependent_launch = true, .rates = kBlackwell.rates};
inline constexpr ArchSpec kSmallBlackwell = {.dependent_launch = true, .rates = kBlackwell.rates};

// sm: compute capability × 10.
inline const ArchSpec& arch_of(int sm) {
  if (sm == 80 || sm == 87) return kAmpere;
  if (sm == 90) return kHopper;
  if (sm == 100 || sm == 103) return kBlackwell;
  return sm < 90 ? kAda : sm < 120 ? kThor : kSmallBlackwell;
}

}  // namespace ingot
