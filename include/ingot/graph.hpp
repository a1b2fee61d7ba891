// Builds graphs: values over the axes [batch, rows, groups, features], written out as the JSON of
// docs/graph-format.md. The library checks shapes and dtypes when the graph is compiled.
#ifndef INGOT_GRAPH_HPP_
#define INGOT_GRAPH_HPP_

#include <charconv>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ingot/error.hpp"

namespace ingot {
inline namespace api {

enum class DataType : int32_t {
  f32 = INGOT_F32,
  f64 = INGOT_F64,
  f16 = INGOT_F16,
  bf16 = INGOT_BF16,
  i64 = INGOT_I64,
  boolean = INGOT_BOOL
};

// Extents; the batch extent is the batch size of a run where `batched`, else 1. An extent of 1
// broadcasts against any other.
struct Shape {
  bool batched = false;
  int64_t rows = 1, groups = 1, features = 1;

  static Shape batch(int64_t features) { return {true, 1, 1, features}; }  // [B, F]
  static Shape batch(int64_t rows, int64_t features) { return {true, rows, 1, features}; }
  static Shape vector(int64_t features) { return {false, 1, 1, features}; }  // [F]
  static Shape matrix(int64_t rows, int64_t features) { return {false, rows, 1, features}; }
  static Shape scalar() { return {}; }
};

enum class Axis { batch, rows, groups, features };
using Axes = std::vector<Axis>;

namespace detail {

inline std::string quoted(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (code < 0x20) {
      out += "\\u00";
      out += kHex[code >> 4];
      out += kHex[code & 15];
    } else {
      out += c;
    }
  }
  return out + '"';
}

// Shortest text that reads back equal, whatever the locale; JSON has no infinities.
inline std::string number(double value) {
  if (std::isnan(value)) return "\"nan\"";
  if (std::isinf(value)) return value > 0 ? "\"inf\"" : "\"-inf\"";
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof text, value);
  return std::string(text, end);
}

inline const char* name_of(DataType dtype) {
  constexpr const char* kNames[] = {"f32", "f64", "f16", "bf16", "i64", "bool"};
  return kNames[static_cast<int32_t>(dtype)];
}

inline std::string json(const Shape& shape) {
  return std::string(shape.batched ? "[\"B\", " : "[1, ") + std::to_string(shape.rows) + ", " +
         std::to_string(shape.groups) + ", " + std::to_string(shape.features) + "]";
}

inline std::string json(const Axes& axes) {
  constexpr const char* kNames[] = {"\"batch\"", "\"rows\"", "\"groups\"", "\"features\""};
  std::string out = "[";
  for (const Axis axis : axes) {
    if (out.size() > 1) out += ", ";
    out += kNames[static_cast<int>(axis)];
  }
  return out + "]";
}

}  // namespace detail

// An attribute of an operator, by its name in docs/graph-format.md.
class Attribute {
 public:
  Attribute(std::string name, bool value)
      : name_(std::move(name)), json_(value ? "true" : "false") {}
  Attribute(std::string name, int value) : Attribute(std::move(name), int64_t{value}) {}
  Attribute(std::string name, int64_t value)
      : name_(std::move(name)), json_(std::to_string(value)) {}
  Attribute(std::string name, double value)
      : name_(std::move(name)), json_(detail::number(value)) {}
  Attribute(std::string name, const char* value)
      : name_(std::move(name)), json_(detail::quoted(value)) {}
  Attribute(std::string name, const Shape& value)
      : name_(std::move(name)), json_(detail::json(value)) {}
  Attribute(std::string name, const Axes& value)
      : name_(std::move(name)), json_(detail::json(value)) {}

  std::string json() const { return detail::quoted(name_) + ": " + json_; }

 private:
  std::string name_, json_;
};
using Attributes = std::vector<Attribute>;

class Graph;

// A value of a graph; valid as long as the graph, which must not move.
class Value {
 public:
  Value(Graph& graph, int id) : graph_(&graph), id_(id) {}
  Graph& graph() const { return *graph_; }
  int id() const { return id_; }

 private:
  Graph* graph_;
  int id_;
};

// Collects values, results and updates. Leaves and results are bound by name at a run, so their
// names must differ.
class Graph {
 public:
  explicit Graph(std::string name) : name_(std::move(name)) {}
  Graph(const Graph&) = delete;  // values point to their graph
  Graph& operator=(const Graph&) = delete;

  Value input(std::string name, Shape shape, DataType dtype = DataType::f32) {
    return leaf("input", std::move(name), shape, dtype);
  }
  Value parameter(std::string name, Shape shape, DataType dtype = DataType::f32) {
    return leaf("parameter", std::move(name), shape, dtype);
  }
  // A parameter that a run may write (running statistics).
  Value buffer(std::string name, Shape shape, DataType dtype = DataType::f32) {
    return leaf("buffer", std::move(name), shape, dtype);
  }
  Value constant(double value) {
    return append("{\"op\": \"constant\", \"value\": " + detail::number(value) + "}");
  }

  // Any operator of docs/graph-format.md; an absent argument is std::nullopt.
  Value apply(std::string_view op, const std::vector<std::optional<Value>>& args,
              const Attributes& attributes = {}) {
    std::string ids, list;
    for (const std::optional<Value>& arg : args) {
      if (arg && &arg->graph() != this) {
        throw Error(INGOT_INVALID_ARGUMENT, std::string(op) + ": argument of another graph");
      }
      ids += (ids.empty() ? "" : ", ") + std::to_string(arg ? arg->id() : -1);
    }
    for (const Attribute& attribute : attributes) {
      list += (list.empty() ? "" : ", ") + attribute.json();
    }
    return append("{\"op\": " + detail::quoted(op) + ", \"args\": [" + ids +
                  "], \"attributes\": {" + list + "}" + origin_json() + "}");
  }

  // Handed back to the caller under this name.
  void result(Value value, std::string name) {
    results_.push_back("{\"value\": " + std::to_string(value.id()) +
                       ", \"name\": " + detail::quoted(name) + "}");
    add_name(result_names_, std::move(name));
  }
  // Written into the buffer after everything has read it.
  void update(Value value, Value buffer) {
    updates_.push_back("{\"value\": " + std::to_string(value.id()) +
                       ", \"buffer\": " + std::to_string(buffer.id()) + "}");
  }
  // Name and source line ("model.cpp:14") that messages give for values appended from now on.
  void set_origin(std::string origin, std::string source = {}) {
    origin_ = std::move(origin);
    source_ = std::move(source);
  }

  // In the order in which a run binds them: leaves, then results.
  const std::vector<std::string>& leaf_names() const { return leaf_names_; }
  const std::vector<std::string>& result_names() const { return result_names_; }
  const std::vector<bool>& leaf_batched() const { return leaf_batched_; }
  const std::string& name() const { return name_; }

  std::string json() const {
    return "{\"ingot_graph\": 1, \"name\": " + detail::quoted(name_) + ",\n \"values\": [\n  " +
           joined(values_) + "],\n \"results\": [" + joined(results_) + "],\n \"updates\": [" +
           joined(updates_) + "]}\n";
  }

 private:
  Value leaf(const char* role, std::string name, Shape shape, DataType dtype) {
    leaf_batched_.push_back(shape.batched);
    const std::string quoted_name = detail::quoted(name);
    add_name(leaf_names_, std::move(name));
    return append(std::string("{\"op\": \"") + role + "\", \"name\": " + quoted_name +
                  ", \"dtype\": \"" + detail::name_of(dtype) +
                  "\", \"shape\": " + detail::json(shape) + "}");
  }
  Value append(std::string value) {
    values_.push_back(std::move(value));
    return {*this, static_cast<int>(values_.size()) - 1};
  }
  void add_name(std::vector<std::string>& names, std::string name) {
    for (const auto* known : {&leaf_names_, &result_names_}) {
      for (const std::string& other : *known) {
        if (other == name) {
          throw Error(INGOT_INVALID_ARGUMENT, "two leaves or results are named '" + name + "'");
        }
      }
    }
    names.push_back(std::move(name));
  }
  std::string origin_json() const {
    std::string out;
    if (!origin_.empty()) out += ", \"origin\": " + detail::quoted(origin_);
    if (!source_.empty()) out += ", \"source\": " + detail::quoted(source_);
    return out;
  }
  static std::string joined(const std::vector<std::string>& items) {
    std::string out;
    for (const std::string& item : items) out += (out.empty() ? "" : ",\n  ") + item;
    return out;
  }

  std::string name_, origin_, source_;
  std::vector<std::string> values_, results_, updates_, leaf_names_, result_names_;
  std::vector<bool> leaf_batched_;
};

inline Value apply(std::string_view op, const std::vector<std::optional<Value>>& args,
                   const Attributes& attributes = {}) {
  return args.at(0)->graph().apply(op, args, attributes);
}

inline Value operator-(Value a) {
  return apply("neg", {a});
}
#define INGOT_API_BINARY(symbol, name)              \
  inline Value operator symbol(Value a, Value b) {  \
    return apply(name, {a, b});                     \
  }                                                 \
  inline Value operator symbol(Value a, double b) { \
    return a symbol a.graph().constant(b);          \
  }                                                 \
  inline Value operator symbol(double a, Value b) { \
    return b.graph().constant(a) symbol b;          \
  }
INGOT_API_BINARY(+, "add")
INGOT_API_BINARY(-, "sub")
INGOT_API_BINARY(*, "mul")
INGOT_API_BINARY(/, "div")
#undef INGOT_API_BINARY

#define INGOT_API_UNARY(name)  \
  inline Value name(Value x) { \
    return apply(#name, {x});  \
  }
INGOT_API_UNARY(exp)
INGOT_API_UNARY(log)
INGOT_API_UNARY(sqrt)
INGOT_API_UNARY(rsqrt)
INGOT_API_UNARY(square)
INGOT_API_UNARY(tanh)
INGOT_API_UNARY(sigmoid)
INGOT_API_UNARY(relu)
INGOT_API_UNARY(silu)
INGOT_API_UNARY(mish)
INGOT_API_UNARY(gelu)
#undef INGOT_API_UNARY

// a: [B, R, K], b: [K, N] (as Shape::matrix). Result [B, R, N].
inline Value matmul(Value a, Value b) {
  return apply("matmul", {a, b}, {{"transpose_b", false}});
}
// b: [N, K], as torch.nn.Linear keeps its weight.
inline Value matmul_transposed(Value a, Value b) {
  return apply("matmul", {a, b}, {{"transpose_b", true}});
}
// x · weightᵀ + bias. weight: [out, in].
inline Value linear(Value x, Value weight, std::optional<Value> bias = {}) {
  return apply("linear", {x, weight, bias});
}

struct BatchNorm {
  std::optional<Value> weight = {}, bias = {};
  std::optional<Value> running_mean = {}, running_var = {}, num_batches_tracked = {};  // buffers
  bool training = false;                 // use the batch's statistics, update the running ones
  std::optional<double> momentum = 0.1;  // absent: the cumulative average
  double eps = 1e-5;
  Axes axes = {Axis::batch};  // those the statistics run over
};
// torch.nn.BatchNorm1d.
inline Value batch_norm(Value x, const BatchNorm& options) {
  Attributes attributes = {
      {"training", options.training}, {"eps", options.eps}, {"axes", options.axes}};
  if (options.momentum) attributes.emplace_back("momentum", *options.momentum);
  return apply("batch_norm",
               {x, options.weight, options.bias, options.running_mean, options.running_var,
                options.num_batches_tracked},
               attributes);
}
inline Value layer_norm(Value x, std::optional<Value> weight = {}, std::optional<Value> bias = {},
                        double eps = 1e-5, const Axes& axes = {Axis::features}) {
  return apply("layer_norm", {x, weight, bias}, {{"eps", eps}, {"axes", axes}});
}

#define INGOT_API_OVER_AXES(name)                                   \
  inline Value name(Value x, const Axes& axes = {Axis::features}) { \
    return apply(#name, {x}, {{"axes", axes}});                     \
  }
INGOT_API_OVER_AXES(softmax)
INGOT_API_OVER_AXES(log_softmax)
INGOT_API_OVER_AXES(logsumexp)
INGOT_API_OVER_AXES(sum)
INGOT_API_OVER_AXES(mean)
INGOT_API_OVER_AXES(max)
INGOT_API_OVER_AXES(min)
#undef INGOT_API_OVER_AXES

}  // namespace api
}  // namespace ingot

#endif
