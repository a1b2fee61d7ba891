// Names in the generated text: of types, of states of reductions and of what is read off these, as
// kernels/common has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "graph/graph.h"

namespace ingot {

// The C++ type that values of a dtype are computed in: "float", "double" or "i64".
std::string compute_type(DType dtype);
// The storage type in kernels/common/scalar.cuh: "f32", "bf16", "boolean", ...
std::string storage_type(DType dtype);
std::string identifier(std::string_view text);
// "Moments<float>"; the type of a reduction's argument is the monoid's.
std::string monoid_type(MonoidKind monoid, const std::string& value_type);
// What a reduction reads off `state`, an expression of the monoid's state.
std::string finish_expression(Finish finish, const std::string& monoid, const std::string& state);
// ".first", ".others.first", ...: the i-th of `count` states of Together<...>.
std::string together_member(size_t index);
// Upper bound of the bytes of a state.
int64_t state_bytes(MonoidKind monoid, const std::string& value_type);

}  // namespace ingot
