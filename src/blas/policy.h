// Which products Ingot takes. What is cheap to know decides first.
#pragma once

#include <optional>

#include "blas/product.h"

namespace ingot::blas {

// What became of a product: taken, or why it was handed on to the library.
enum class Outcome : uint8_t {
  taken_fp32,
  taken_tf32,
  not_fp32,
  unusual,
  small,
  small_batch,
  pointer_batch,
  epilogue,
  math_mode,
  zero_alpha,
  scalars,
  capturing,
  device,
  library_faster,
  shapes,
  memory,
  unavailable,
  failed,
};
const char* name_of(Outcome outcome);
inline bool is_taken(Outcome outcome) {
  return outcome <= Outcome::taken_tf32;
}

// Of the environment: INGOT, INGOT_BLAS, NVIDIA_TF32_OVERRIDE, INGOT_BLAS_CAPTURE. Read once.
struct Settings {
  bool on = true;
  bool tf32 = true;            // may be used where a program allows it
  bool takes_captured = true;  // products of streams under capture, too
  static Settings read();
};
const Settings& settings();

// Whether products are taken at all: the environment allows it, and the process has not switched it
// off (redirect.h).
bool is_on();
void switch_to(bool on);

// By the shape of a sound product alone: nullopt if it may be taken.
std::optional<Outcome> refuses(const Product& product);

// Whether a batch by pointers gains more than its copies take.
bool pays_by_pointers(const Product& batch, Outcome precision);

// Whether the products of a batch may be launched one by one.
bool may_run_one_by_one(const Product& batch);

// What a program allows: taken_fp32 or taken_tf32, or math_mode where it asks for something that is
// not Ingot's to give.
Outcome precision_of(int compute_type, int math_mode, const Settings& settings);

}  // namespace ingot::blas
