// What products a process asked for and what became of them, for the report at its end.
#pragma once

#include <string>

#include "blas/policy.h"

namespace ingot::blas {

void count(const char* function, const Product& product, Outcome outcome);
// Of products that are no fp32 ones only the number is kept.
void count_other();

// One line of JSON: {"process", "command", "products": [{"function", "transpose_a", "transpose_b",
// "m", "n", "k", "batches", "outcome", "taken", "count"}], "other", "dropped"}. "dropped" counts
// products of more kinds than are kept.
std::string report_as_json();
std::string report_as_text();

// Writes the report where INGOT_BLAS_REPORT says ("stderr", or a file that it is appended to) when
// the process ends. A process that asked for no product writes nothing.
void report_at_exit();

}  // namespace ingot::blas
