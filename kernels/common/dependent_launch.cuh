// Programmatic dependent launch (cc 9.0+; nothing on older devices): a kernel may start while the
// one before it on the stream still runs, and waits here until that one's results are visible.
#pragma once

#include "common/types.cuh"

namespace ingot {

// To be called by every thread before it touches memory that an earlier kernel writes or reads.
INGOT_D void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks be scheduled as this one's leave the multiprocessors. It promises
// nothing about results: the next kernel waits for the end of this one.
INGOT_D void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace ingot
