// The functions of libingot.so, which is opened when a product first needs it.
#pragma once

#include <string>

#include "ingot/ingot.h"

namespace ingot::blas {

struct Ingot {
  decltype(&ingot_abi_version) abi_version = nullptr;
  decltype(&ingot_last_error) last_error = nullptr;
  decltype(&ingot_program_create) create = nullptr;
  decltype(&ingot_program_uses_library) uses_library = nullptr;
  decltype(&ingot_program_prepare_call) prepare_call = nullptr;
  decltype(&ingot_program_run) run = nullptr;
  decltype(&ingot_matrix_array_prepare) prepare_arrays = nullptr;
  decltype(&ingot_matrix_array_gather) gather = nullptr;
  decltype(&ingot_matrix_array_scatter) scatter = nullptr;
  bool complete = false;
};
const Ingot& ingot();

// To the user, on stderr.
void say(const std::string& message);

}  // namespace ingot::blas
