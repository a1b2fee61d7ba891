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
  int leaf(const char* role, const char* name, const char* shape, int64_t a, int64_t b) {
    char text[256], extents[64];
    std::snprintf(extents, sizeof(extents), shape, static_cast<long long>(a),
                  static_cast<long long>(b));
    std::snprintf(text, sizeof(text), R"("op": "%s", "name": "%s", "dtype": "f32", "shape": [%s])",
                  role, name, extents);
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

std::string graph_of(const GraphKey& key) {
  Graph graph;
  const int x = graph.leaf("input", "x", "\"B\", 1, 1, %lld", key.k, 0);
  const int w = key.w_along_k ? graph.leaf("input", "w", "1, %lld, 1, %lld", key.features, key.k)
                              : graph.leaf("input", "w", "1, %lld, 1, %lld", key.k, key.features);
  const bool adds = key.scalars.beta != 0;
  const int c = adds ? graph.leaf("buffer", "c", "\"B\", 1, 1, %lld", key.features, 0) : -1;
  const int bias = key.bias ? graph.leaf("input", "bias", "1, 1, 1, %lld", key.features, 0) : -1;
  int y = graph.apply("matmul", x, w,
                      key.w_along_k ? R"(, "attributes": {"transpose_b": true})"
                                    : R"(, "attributes": {"transpose_b": false})");
  y = graph.scale(y, key.scalars.alpha);
  if (adds) y = graph.apply("add", y, graph.scale(c, key.scalars.beta));
  if (key.bias) y = graph.apply("add", y, bias);
  char end[128];
  if (key.relu) {
    std::snprintf(end, sizeof(end), R"("op": "relu", "args": [%d])", y);
    y = graph.add(end);
  }
  if (adds) {
    std::snprintf(end, sizeof(end), R"("results": [], "updates": [{"value": %d, "buffer": %d}])", y,
                  c);
  } else {
    std::snprintf(end, sizeof(end), R"("results": [{"value": %d, "name": "y"}], "updates": [])", y);
  }
  return R"({"ingot_graph": 1, "name": "product", "values": [)" + graph.values() + "], " + end +
         "}";
}

}  // namespace ingot::blas
