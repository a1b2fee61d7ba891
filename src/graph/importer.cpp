#include "graph/importer.h"

#include <cmath>
#include <limits>

#include "graph/operators.h"
#include "support/error.h"
#include "support/json.h"

namespace ingot {
namespace {

using Json = nlohmann::json;

constexpr int kFormatVersion = 1;

void check_keys(const Json& object, std::initializer_list<std::string_view> known,
                std::string_view what) {
  if (!object.is_object()) fail(INGOT_INVALID_ARGUMENT, "{} must be an object", what);
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      fail(INGOT_INVALID_ARGUMENT, "{} has an unknown key '{}'; known are [{}]", what, key,
           fmt::join(known, ", "));
    }
  }
}

std::string text_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) return {};
  if (!found->is_string()) fail(INGOT_INVALID_ARGUMENT, "'{}' must be a text", key);
  return found->get<std::string>();
}

std::string required_text(const Json& object, const char* key) {
  std::string text = text_at(object, key);
  if (text.empty()) fail(INGOT_INVALID_ARGUMENT, "'{}' is missing", key);
  return text;
}

const Json& list_at(const Json& object, const char* key) {
  static const Json empty = Json::array();
  const auto found = object.find(key);
  if (found == object.end()) return empty;
  if (!found->is_array()) fail(INGOT_INVALID_ARGUMENT, "'{}' must be a list", key);
  return *found;
}

// JSON has no infinities: they are written as texts.
double number_from(const Json& json, std::string_view what) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (json.is_number()) return json.get<double>();
  if (json.is_boolean()) return json.get<bool>() ? 1 : 0;
  if (json == "inf") return kInfinity;
  if (json == "-inf") return -kInfinity;
  if (json == "nan") return std::numeric_limits<double>::quiet_NaN();
  fail(INGOT_INVALID_ARGUMENT, "'{}' must be a number, \"inf\", \"-inf\" or \"nan\"", what);
}

Json number_to(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

int64_t index_from(const Json& json, std::string_view what) {
  if (!json.is_number_integer()) fail(INGOT_INVALID_ARGUMENT, "{} must be an integer", what);
  return json.get<int64_t>();
}

// An extent, or the name of the symbolic batch or of an axis.
int64_t list_item_from(const Json& item, std::string_view attribute) {
  if (item == "B") return kSymbolicBatch;
  if (item.is_string()) return axis_from(item.get<std::string>());
  if (item.is_number_integer()) return item.get<int64_t>();
  fail(INGOT_INVALID_ARGUMENT, "attribute '{}' must list integers or axis names", attribute);
}

Attribute attribute_from(const std::string& name, const Json& json) {
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_integer()) return json.get<int64_t>();
  if (json.is_number()) return json.get<double>();
  if (json == "inf" || json == "-inf" || json == "nan") return number_from(json, name);
  if (json.is_string()) return json.get<std::string>();
  if (json.is_array()) {
    std::vector<int64_t> list;
    for (const Json& item : json) list.push_back(list_item_from(item, name));
    return list;
  }
  fail(INGOT_INVALID_ARGUMENT, "attribute '{}' must be a number, flag, text or list", name);
}

Shape shape_from(const Json& json) {
  const bool valid = json.is_array() && json.size() == kAxes && (json[0] == "B" || json[0] == 1) &&
                     json[1].is_number_integer() && json[2].is_number_integer() &&
                     json[3].is_number_integer();
  if (!valid) {
    fail(INGOT_INVALID_ARGUMENT,
         "'shape' must be four extents [batch, rows, groups, features], batch being \"B\" or 1");
  }
  return {json[0] == "B", json[1].get<int64_t>(), json[2].get<int64_t>(), json[3].get<int64_t>()};
}

Json shape_to(const Shape& shape) {
  return {shape.batched ? Json("B") : Json(1), shape.rows, shape.groups, shape.features};
}

class Importer {
 public:
  Graph run(const Json& json);

 private:
  void append(const Json& value);
  ValueId leaf(const Json& value, LeafRole role);
  ValueId constant(const Json& value);
  ValueId operation(const Json& value, const std::string& op);
  void check_declared(const Json& value, ValueId id) const;
  ValueId resolve(const Json& index, std::string_view what, bool may_be_absent) const;

  GraphBuilder builder_;
  std::vector<ValueId> ids_;  // of each value of the file
};

// The node that a value of the file stands for.
ValueId Importer::resolve(const Json& index, std::string_view what, bool may_be_absent) const {
  const int64_t value = index_from(index, what);
  if (value == -1 && may_be_absent) return kNoValue;
  if (value < 0 || value >= static_cast<int64_t>(ids_.size())) {
    fail(INGOT_INVALID_ARGUMENT, "{} names value {}, which is not an earlier one", what, value);
  }
  return ids_[static_cast<size_t>(value)];
}

ValueId Importer::leaf(const Json& value, LeafRole role) {
  check_keys(value, {"op", "name", "dtype", "shape", "attributes", "origin", "source"}, "a leaf");
  if (!value.contains("shape")) fail(INGOT_INVALID_ARGUMENT, "'shape' is missing");
  const Shape shape = shape_from(value["shape"]);
  const std::string dtype = required_text(value, "dtype");
  const ValueId id = builder_.leaf(role, required_text(value, "name"), dtype_from(dtype), shape);
  if (const auto attributes = value.find("attributes"); attributes != value.end()) {
    check_keys(*attributes, {"positions"}, "the attributes of a leaf");
    const Json positions = attributes->value("positions", Json(false));
    if (!positions.is_boolean()) fail(INGOT_INVALID_ARGUMENT, "'positions' must be a flag");
    if (positions.get<bool>()) builder_.hold_positions(id);
  }
  return id;
}

ValueId Importer::constant(const Json& value) {
  check_keys(value, {"op", "value", "dtype", "shape", "origin", "source"}, "a constant");
  if (!value.contains("value")) fail(INGOT_INVALID_ARGUMENT, "'value' is missing");
  const std::string dtype = text_at(value, "dtype");
  return builder_.constant(number_from(value["value"], "value"),
                           dtype.empty() ? DType::f32 : dtype_from(dtype));
}

ValueId Importer::operation(const Json& value, const std::string& op) {
  check_keys(value, {"op", "args", "attributes", "dtype", "shape", "origin", "source"}, "a value");
  OperatorCall call;
  for (const Json& arg : list_at(value, "args")) {
    call.args.push_back(resolve(arg, "an argument", true));
  }
  if (const auto attributes = value.find("attributes"); attributes != value.end()) {
    if (!attributes->is_object()) fail(INGOT_INVALID_ARGUMENT, "'attributes' must be an object");
    for (const auto& [name, attribute] : attributes->items()) {
      // null is Python's None: the attribute is absent.
      if (!attribute.is_null()) call.attributes.emplace(name, attribute_from(name, attribute));
    }
  }
  return apply_operator(builder_, op, call);
}

// A value may declare its dtype and shape; then they must be what its arguments give.
void Importer::check_declared(const Json& value, ValueId id) const {
  const Node& node = builder_.graph()[id];
  if (value.contains("shape") && shape_from(value["shape"]) != node.shape) {
    fail(INGOT_INVALID_ARGUMENT, "declares shape {}, but its arguments give {}",
         to_string(shape_from(value["shape"])), to_string(node.shape));
  }
  const std::string dtype = text_at(value, "dtype");
  if (!dtype.empty() && dtype_from(dtype) != node.dtype) {
    fail(INGOT_INVALID_ARGUMENT, "declares dtype {}, but its arguments give {}", dtype,
         name_of(node.dtype));
  }
}

void Importer::append(const Json& value) {
  if (!value.is_object()) fail(INGOT_INVALID_ARGUMENT, "must be an object");
  const std::string op = required_text(value, "op");
  builder_.set_origin(text_at(value, "origin"), text_at(value, "source"));
  ValueId id = kNoValue;
  if (op == "input") {
    id = leaf(value, LeafRole::input);
  } else if (op == "parameter") {
    id = leaf(value, LeafRole::parameter);
  } else if (op == "buffer") {
    id = leaf(value, LeafRole::buffer);
  } else if (op == "constant") {
    id = constant(value);
  } else {
    id = operation(value, op);
  }
  check_declared(value, id);
  ids_.push_back(id);
}

// "value 7 (softmax of 'act', model.py:14)"
std::string describe(size_t index, const Json& value) {
  std::string text = fmt::format("value {}", index);
  if (!value.is_object()) return text;
  const auto field = [&value](const char* key) {
    const auto found = value.find(key);
    return found != value.end() && found->is_string() ? found->get<std::string>() : std::string();
  };
  const std::string op = field("op"), source = field("source");
  std::string name = field("name");
  if (name.empty()) name = field("origin");
  if (op.empty()) return text;
  text += " (" + op;
  if (!name.empty()) text += fmt::format(" '{}'", name);
  if (!source.empty()) text += ", " + source;
  return text + ")";
}

Graph Importer::run(const Json& json) {
  check_keys(json, {"ingot_graph", "name", "values", "results", "updates"}, "a graph");
  if (!json.contains("ingot_graph") || json["ingot_graph"] != kFormatVersion) {
    fail(INGOT_INVALID_ARGUMENT,
         "this is not a graph of format {}: the key \"ingot_graph\" must be {}", kFormatVersion,
         kFormatVersion);
  }
  const Json& values = list_at(json, "values");
  for (size_t i = 0; i < values.size(); ++i) {
    try {
      append(values[i]);
    } catch (const Error& error) {
      fail(error.status(), "{}: {}", describe(i, values[i]), error.what());
    }
  }
  for (const Json& result : list_at(json, "results")) {
    check_keys(result, {"value", "name"}, "a result");
    builder_.result(resolve(result.value("value", Json()), "a result", false),
                    text_at(result, "name"));
  }
  for (const Json& update : list_at(json, "updates")) {
    check_keys(update, {"value", "buffer"}, "an update");
    builder_.update(resolve(update.value("value", Json()), "an update", false),
                    resolve(update.value("buffer", Json()), "an update", false));
  }
  Graph graph = builder_.take();
  if (const std::string name = text_at(json, "name"); !name.empty()) graph.name = name;
  return graph;
}

Json attributes_to(const Node& node) {
  switch (node.kind) {
    case NodeKind::matmul:
      return {{"transpose_b", node.transpose_b}};
    case NodeKind::reduce: {
      Json axes = Json::array();
      for (int axis = 0; axis < kAxes; ++axis) {
        if (node.axes & axis_bit(static_cast<Axis>(axis))) {
          axes.push_back(name_of(static_cast<Axis>(axis)));
        }
      }
      return {{"finish", name_of(node.finish)}, {"axes", axes}};
    }
    case NodeKind::view:
      return {{"shape", shape_to(node.shape)}};
    case NodeKind::pointwise:
      if (node.op == PointwiseOp::cast_) return {{"dtype", name_of(node.dtype)}};
      return nullptr;
    case NodeKind::leaf:
      if (node.positions) return {{"positions", true}};
      return nullptr;
    default:
      return nullptr;
  }
}

std::string_view operator_name(const Node& node) {
  switch (node.kind) {
    case NodeKind::leaf:
      return node.role == LeafRole::input       ? "input"
             : node.role == LeafRole::parameter ? "parameter"
                                                : "buffer";
    case NodeKind::constant:
      return "constant";
    case NodeKind::matmul:
      return "matmul";
    case NodeKind::pointwise:
      return name_of(node.op);
    case NodeKind::reduce:
      return "reduce";
    case NodeKind::view:
      return "view";
    case NodeKind::scan:
      return "scan";
  }
  return "";
}

Json node_to(const Node& node) {
  Json json = {
      {"op", operator_name(node)}, {"dtype", name_of(node.dtype)}, {"shape", shape_to(node.shape)}};
  if (!node.name.empty()) json[node.kind == NodeKind::leaf ? "name" : "origin"] = node.name;
  if (!node.source.empty()) json["source"] = node.source;
  if (node.kind == NodeKind::constant) json["value"] = number_to(node.constant);
  if (!node.args.empty()) json["args"] = node.args;
  if (Json attributes = attributes_to(node); !attributes.is_null()) {
    json["attributes"] = std::move(attributes);
  }
  return json;
}

}  // namespace

Graph import_graph(std::string_view text) {
  return graph_from(parse_json(text, "the text of the graph"));
}

Graph graph_from(const Json& json) {
  return Importer().run(json);
}

Json export_graph(const Graph& graph) {
  Json json = {{"ingot_graph", kFormatVersion}, {"name", graph.name}};
  json["values"] = Json::array();
  for (const Node& node : graph.nodes) json["values"].push_back(node_to(node));
  json["results"] = Json::array();
  for (const Result& result : graph.results) {
    json["results"].push_back({{"value", result.value}, {"name", result.name}});
  }
  json["updates"] = Json::array();
  for (const Update& update : graph.updates) {
    json["updates"].push_back({{"value", update.value}, {"buffer", update.buffer}});
  }
  return json;
}

}  // namespace ingot
