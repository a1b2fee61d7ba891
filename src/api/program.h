// What an ingot_program handle holds, from the graph's text to what runs.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "backend/executable.h"
#include "rewrite/rewrite.h"

namespace ingot::abi {

// An operator as the caller wrote it, before it was expanded into the IR's nodes.
struct SourceOperator {
  std::string op, origin, source;
};

struct Program {
  ProgramOptions options;
  Graph original;
  std::vector<ValueId> leaves;  // of it, ascending
  int64_t largest_batch = 0;
  std::vector<SourceOperator> operators;
  std::vector<AppliedRewrite> rewrites;
  Plan plan;
  std::unique_ptr<Executable> executable;
};

std::unique_ptr<Program> make_program(std::string_view graph_json, std::string_view options_json);

// Throws Error where the batch size is negative or larger than the program's.
void check_batch(const Program& program, int64_t batch);

// Throws Error (INGOT_INVALID_ARGUMENT) naming the tensor that does not fit its leaf or result.
void check_tensors(const Program& program, int64_t batch, std::span<const ingot_tensor> tensors);

}  // namespace ingot::abi
