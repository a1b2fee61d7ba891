#include <charconv>
#include <cstdio>
#include <string>

#include "blas/programs.h"

namespace ingot::blas {
namespace {

class Graph {
 public:
  int add(const std::string& value) {
    if (count_ > 0) values_ += ", ";
    values_ += "{" + value + "}";
    return count_++;
  }
  int leaf(const char* role, const char* name, const std::string& batch, int64_t rows,
           int64_t features) {
    char text[256];
    std::snprintf(text, sizeof(text),
                  R"("op": "%s", "name": "%s", "dtype": "f32", "shape": [%s, %lld, 1, %lld])", role,
                  name, batch.c_str(), static_cast<long long>(rows),
                  static_cast<long long>(features));
    return add(text);
  }
  int apply(const char* op, int a, const char* attributes = "") {
    char text[128];
    std::snprintf(text, sizeof(text), R"("op": "%s", "args": [%d]%s)", op, a, attributes);
    return add(text);
  }
  int apply(const char* op, int a, int b, const char* attributes = "") {
    char text[256];
    std::snprintf(text, sizeof(text), R"("op": "%s", "args": [%d, %d]%s)", op, a, b, attributes);
    return add(text);
  }
  int scale(int value, float factor) {
    if (factor == 1) return value;
    // Not by printf, whose decimal point is the locale's.
    char text[64];
    const std::to_chars_result end = std::to_chars(text, text + sizeof(text), factor);
    const int constant = add(R"("op": "constant", "value": )" + std::string(text, end.ptr));
    return apply("mul", value, constant);
  }
  const std::string& values() const { return values_; }

 private:
  std::string values_;
  int count_ = 0;
};

}  // namespace

namespace {

// factor · value, or 0 where the factor, which lies in memory, is 0: what the value is does not
// count then.
int scale_by_leaf(Graph& graph, int value, int factor) {
  const int zero = graph.add(R"("op": "constant", "value": 0)");
  const int product = graph.apply("mul", value, factor);
  char text[96];
  std::snprintf(text, sizeof(text), R"("op": "select", "args": [%d, %d, %d])", factor, product,
                zero);
  return graph.add(text);
}

}  // namespace

std::string graph_of(const GraphKey& key) {
  Graph graph;
  const int64_t rows = key.batch_rows == 0 ? 1 : key.batch_rows;
  const std::string batch = key.batch_rows == 0 ? "1" : "\"B\"";
  const int x = graph.leaf("input", "x", "\"B\"", rows, key.k);
  const int w = key.w_along_k ? graph.leaf("input", "w", batch, key.features, key.k)
                              : graph.leaf("input", "w", batch, key.k, key.features);
  const bool in_place = key.adds && !key.apart;
  const int c =
      key.adds ? graph.leaf(in_place ? "buffer" : "input", "c", "\"B\"", rows, key.features) : -1;
  const bool leaves = key.scalars_in_memory;
  const int alpha = leaves ? graph.leaf("input", "alpha", "1", 1, 1) : -1;
  const int beta = leaves && key.adds ? graph.leaf("input", "beta", "1", 1, 1) : -1;
  const int bias =
      key.bias ? graph.leaf("input", "bias", key.own_bias ? batch : "1", 1, key.features) : -1;
  int y = graph.apply("matmul", x, w,
                      key.w_along_k ? R"(, "attributes": {"transpose_b": true})"
                                    : R"(, "attributes": {"transpose_b": false})");
  y = leaves ? scale_by_leaf(graph, y, alpha) : graph.scale(y, key.scalars.alpha);
  if (key.adds) {
    const int scaled = leaves ? scale_by_leaf(graph, c, beta) : graph.scale(c, key.scalars.beta);
    y = graph.apply("add", y, scaled);
  }
  if (key.bias) y = graph.apply("add", y, bias);
  if (key.activation == Activation::relu) {
    y = graph.apply("relu", y);
  } else if (key.activation == Activation::gelu) {
    y = graph.apply("gelu", y, R"(, "attributes": {"approximate": "tanh"})");
  }
  char end[128];
  if (in_place) {
    std::snprintf(end, sizeof(end), R"("results": [], "updates": [{"value": %d, "buffer": %d}])", y,
                  c);
  } else {
    std::snprintf(end, sizeof(end), R"("results": [{"value": %d, "name": "y"}], "updates": [])", y);
  }
  return R"({"ingot_graph": 1, "name": "product", "values": [)" + graph.values() + "], " + end +
         "}";
}

}  // namespace ingot::blas
