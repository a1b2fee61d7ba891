// Workspace buffers that lie in results: a result's memory is the caller's, and free until the
// result is written there.
#pragma once

#include "plan/plan.h"

namespace ingot {

// By buffer the result, by its ordinal, in whose memory it lies, or -1. A buffer that a map reads
// last may lie where this map writes the result: at each element it reads before it writes.
// may_host: by result, whether its memory is dense and nobody else's. left_out: buffers that nobody
// uses.
std::vector<int> hosting_results(const Plan& plan, const std::vector<bool>& may_host,
                                 const std::vector<bool>& left_out);

}  // namespace ingot
