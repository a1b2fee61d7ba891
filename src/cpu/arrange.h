// The order of a phase's steps, which of them are done together, and the buffers of their slots.
#pragma once

#include "cpu/phase.h"

namespace ingot::cpu {

// Puts compositions (composites.h) in the place of the steps that they stand for.
void compose(Phase* phase);

// Orders the steps and cuts them into runs: first what does not vary with the batch, which is
// computed once for a strip of tiles; then so that pointwise steps over the same elements stand
// together.
void arrange(Phase* phase);

// Gives buffers to the slots of a phase that is arranged and knows its stores.
void assign_buffers(Phase* phase);

}  // namespace ingot::cpu
