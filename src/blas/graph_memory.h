// Workspaces of products that become nodes of a CUDA graph.
#pragma once

#include "blas/workspace.h"

namespace ingot::blas {

// For a stream that is being captured. The graph holds the memory as a user object (CUDA's word),
// which its copies and what is instantiated of it hold too; after the last of them the memory
// serves later captures. Empty where the driver cannot do so, or there is no room.
Scratch graph_scratch(const Place& place, Stream stream, size_t bytes);

}  // namespace ingot::blas
