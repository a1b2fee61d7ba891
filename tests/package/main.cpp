// A linear layer with a ReLU through the C ABI of the installed library, on the host.
#include <ingot/ingot.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr const char* kGraph = R"({
  "ingot_graph": 1,
  "name": "linear_relu",
  "values": [
    {"op": "input",     "name": "x",      "dtype": "f32", "shape": ["B", 1, 1, 3]},
    {"op": "parameter", "name": "weight", "dtype": "f32", "shape": [1, 2, 1, 3]},
    {"op": "parameter", "name": "bias",   "dtype": "f32", "shape": [1, 1, 1, 2]},
    {"op": "matmul", "args": [0, 1], "attributes": {"transpose_b": true}},
    {"op": "add",    "args": [3, 2]},
    {"op": "relu",   "args": [4]}
  ],
  "results": [{"value": 5, "name": "y"}],
  "updates": []
})";

ingot_tensor host_tensor(std::vector<float>& values, int64_t batch, int64_t rows,
                         int64_t features) {
  return {values.data(),
          {batch, rows, 1, features},
          {rows * features, features, features, 1},
          INGOT_F32,
          -1};
}

void require(ingot_status status, const char* what) {
  if (status == INGOT_OK) return;
  std::fprintf(stderr, "%s: %s\n", what, ingot_last_error());
  std::exit(1);
}

}  // namespace

int main() {
  std::vector<float> x{1, 2, 3, -4, 5, -6};
  std::vector<float> weight{1, 0, 2, -1, 1, 1};
  std::vector<float> bias{0.5F, -1};
  std::vector<float> y(4, std::nanf(""));
  const std::vector<float> expected{7.5F, 3, 0, 2};

  ingot_program* program = nullptr;
  require(ingot_program_create(kGraph, R"({"device": "cpu"})", &program), "create");
  require(ingot_program_prepare(program, 2, -1), "prepare");
  size_t workspace_bytes = 0;
  require(ingot_program_workspace_size(program, 2, &workspace_bytes), "workspace_size");
  void* workspace = std::aligned_alloc(256, (workspace_bytes / 256 + 1) * 256);
  const ingot_tensor tensors[] = {host_tensor(x, 2, 1, 3), host_tensor(weight, 1, 2, 3),
                                  host_tensor(bias, 1, 1, 2), host_tensor(y, 2, 1, 2)};
  require(ingot_program_run(program, 2, tensors, 4, workspace, workspace_bytes, nullptr), "run");
  std::free(workspace);
  ingot_program_destroy(program);

  for (size_t i = 0; i < y.size(); ++i) {
    if (!(std::fabs(y[i] - expected[i]) <= 1e-6F)) {
      std::fprintf(stderr, "y[%zu] is %g, expected %g\n", i, double{y[i]}, double{expected[i]});
      return 1;
    }
  }
  std::printf("ingot %s: linear + relu correct, as C++\n", ingot_version());
  return 0;
}
