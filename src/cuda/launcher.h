// Launches programs: fills the addresses of a call in, describes matrices to the copy engine, and
// hands the steps to a stream.
#pragma once

#include "cuda/context.h"
#include "cuda/modules.h"
#include "program/launch_program.h"

namespace ingot::cuda {

// The units that its kernels are in.
std::vector<int> units_of(const LaunchProgram& program);

// Bytes of the workspace that a call takes on this GPU: of what its library's products may use,
// what the algorithms that are chosen for them do.
size_t needed_workspace(const LaunchProgram& program, Context& context);

// Kernels that are not there yet are compiled side by side, and loaded.
// dependent: kernels may start before their predecessors end, and wait for them by themselves.
void launch(const LaunchProgram& program, Context& context, Modules& modules,
            const CallMemory& memory, CUstream stream, bool dependent);

}  // namespace ingot::cuda
