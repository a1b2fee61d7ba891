// One text for kernels that differ by their names alone.
//
// A network of fifty layers has few kernels but many texts: names carry numbers of values and of
// layers, comments say where an operator came from. What is compiled, and kept in the cache, has
// neither, so that equal layers, of one network or of several, are compiled once. What is shown to
// people keeps its names.
#pragma once

#include <string>
#include <vector>

#include "cuda/compiler.h"

namespace ingot::cuda {

struct CanonicalSource {
  CompileRequest request;
  std::vector<std::string> functions;  // those asked for, in their order, by their names in it
};

// Drops comments, numbers values ("v81_net_12_bias" and the like) by their first appearance, and
// drops digits from the names of `functions` and of the structs that the text defines.
CanonicalSource canonical_source(const CompileRequest& source,
                                 const std::vector<std::string>& functions);

}  // namespace ingot::cuda
