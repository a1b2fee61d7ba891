#include "codegen/device_functions.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace ingot {

std::string literal(double value, const std::string& type) {
  if (type == "i64") return fmt::format("{}ll", static_cast<int64_t>(value));
  if (std::isinf(value)) {
    return fmt::format("{}math::infinity<{}>()", value < 0 ? "-" : "", type);
  }
  if (std::isnan(value)) {
    return fmt::format("(math::infinity<{0}>() - math::infinity<{0}>())", type);
  }
  // Shortest text that reads back as the same number of the type.
  std::string text =
      type == "float" ? fmt::format("{}", static_cast<float>(value)) : fmt::format("{}", value);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  if (type == "float") text += "f";
  return value < 0 || std::signbit(value) ? "(" + text + ")" : text;
}

std::string DeviceFunctions::expression(ValueId id, const std::string& type,
                                        const std::vector<std::string>& args) {
  const Node& node = graph_[id];
  switch (node.op) {
    case PointwiseOp::add_:
      return fmt::format("{} + {}", args[0], args[1]);
    case PointwiseOp::sub_:
      if (type != "i64" && (is_extreme(node.args[0]) || is_extreme(node.args[1]))) {
        return fmt::format("math::difference({}, {})", args[0], args[1]);
      }
      return fmt::format("{} - {}", args[0], args[1]);
    case PointwiseOp::mul_:
      return fmt::format("{} * {}", args[0], args[1]);
    case PointwiseOp::div_:
      if (type == "float") return division(node, args[0], args[1], is_rounded(id));
      break;
    case PointwiseOp::exp_:
    case PointwiseOp::sigmoid_:
      if (type == "float" && is_rounded(id)) {
        return fmt::format("math::coarse::{}({})", name_of(node.op), args[0]);
      }
      break;
    case PointwiseOp::tanh_:
      if (type == "float" && is_rounded_to_bf16(id)) {
        return fmt::format("math::coarse::tanh({})", args[0]);
      }
      break;
    default:
      break;
  }
  return fmt::format("pointwise::{}({})", name_of(node.op), fmt::join(args, ", "));
}

std::string DeviceFunctions::division(const Node& node, const std::string& a, const std::string& b,
                                      bool is_rounded) {
  constexpr double kModerate = 0x1p60;
  const ValueRange divisor = ranges_.of(node.args[1]);
  if (divisor.low == divisor.high && divisor.within(1 / kModerate, kModerate)) {
    // As PyTorch divides by a number.
    return fmt::format("{} * {}", a, literal(1.0 / static_cast<float>(divisor.low), "float"));
  }
  const char* function = "divide";
  if (divisor.low >= 1 / kModerate || divisor.high <= -1 / kModerate) {
    function = is_rounded ? "coarse::divide_by_normal"
               : divisor.within(-kModerate, kModerate) &&
                       ranges_.of(node.args[0]).within(-kModerate, kModerate)
                   ? "divide_moderate"
                   : "divide_by_normal";
  }
  return fmt::format("math::{}({}, {})", function, a, b);
}

std::optional<DeviceFunctions::Composition> DeviceFunctions::composition(ValueId id) {
  const Node& node = graph_[id];
  if (node.kind != NodeKind::pointwise || node.dtype != DType::f32) return std::nullopt;
  if (node.op == PointwiseOp::add_) return one_plus(id);
  if (node.op == PointwiseOp::exp_) return normal_density(id);
  return std::nullopt;
}

// 1 + erf(u) or 1 + tanh(u), where nobody else reads the function itself.
std::optional<DeviceFunctions::Composition> DeviceFunctions::one_plus(ValueId id) {
  const std::vector<ValueId>& args = graph_[id].args;
  for (const size_t i : {0, 1}) {
    const Node& term = graph_[args[i]];
    if (term.kind != NodeKind::pointwise || term.dtype != DType::f32 ||
        !is_constant(args[1 - i], 1) || readers_of(args[i]).size() != 1) {
      continue;
    }
    if (term.op == PointwiseOp::tanh_) {
      return Composition{"math::one_plus_tanh({})", term.args[0], {args[i]}};
    }
    if (term.op == PointwiseOp::erf_) {
      const char* function = is_rounded(id) ? "math::coarse::one_plus_erf" : "math::one_plus_erf";
      return Composition{std::string(function) + "({})", term.args[0], {args[i]}};
    }
  }
  return std::nullopt;
}

// e^(−x²/2) in a graph that has erf(x/√2), too: by the power that the latter computes as well.
std::optional<DeviceFunctions::Composition> DeviceFunctions::normal_density(ValueId id) {
  constexpr double kHalf = 1 / std::numbers::sqrt2;
  const ValueId scaled = graph_[id].args[0];
  const Node& product = graph_[scaled];
  if (product.kind != NodeKind::pointwise || product.op != PointwiseOp::mul_) return std::nullopt;
  const size_t at = is_constant(product.args[0], -0.5) ? 1 : 0;
  if (!is_constant(product.args[1 - at], -0.5)) return std::nullopt;
  const ValueId power = product.args[at];
  const Node& square = graph_[power];
  const bool is_square = square.kind == NodeKind::pointwise &&
                         (square.op == PointwiseOp::square_ ||
                          (square.op == PointwiseOp::mul_ && square.args[0] == square.args[1]));
  if (!is_square || square.dtype != DType::f32) return std::nullopt;
  const ValueId x = square.args[0];
  const auto feeds_erf = [&](ValueId user) {
    const Node& u = graph_[user];
    if (u.kind != NodeKind::pointwise || u.op != PointwiseOp::mul_) return false;
    const ValueId factor = u.args[0] == x ? u.args[1] : u.args[0];
    const Node& constant = graph_[factor];
    if (constant.kind != NodeKind::constant || std::abs(constant.constant - kHalf) > 1e-9) {
      return false;
    }
    const std::vector<ValueId>& readers = readers_of(user);
    return std::any_of(readers.begin(), readers.end(), [&](ValueId reader) {
      return graph_[reader].kind == NodeKind::pointwise && graph_[reader].op == PointwiseOp::erf_;
    });
  };
  const std::vector<ValueId>& beside = readers_of(x);
  if (!std::any_of(beside.begin(), beside.end(), feeds_erf)) return std::nullopt;
  const std::string text =
      fmt::format("math::exp_of_minus_square({{}} * {})", literal(kHalf, "float"));
  return Composition{text, x, {scaled, power}};
}

bool DeviceFunctions::is_extreme(ValueId id) const {
  const Node& node = graph_[behind_views(graph_, id)];
  if (node.kind != NodeKind::reduce) return false;
  return node.finish == Finish::max || node.finish == Finish::min ||
         node.finish == Finish::max_exponent || node.finish == Finish::log_sum_exp;
}

bool DeviceFunctions::is_constant(ValueId id, double number) const {
  return graph_[id].kind == NodeKind::constant && graph_[id].constant == number;
}

bool DeviceFunctions::is_rounded_to_bf16(ValueId id) const {
  const Node& node = graph_[id];
  if (node.dtype == DType::bf16) return true;
  const std::vector<ValueId>& readers = readers_of(id);
  return is_rounded(id) && std::all_of(readers.begin(), readers.end(), [&](ValueId reader) {
           return graph_[reader].kind == NodeKind::pointwise &&
                  graph_[reader].op == PointwiseOp::cast_ && graph_[reader].dtype == DType::bf16;
         });
}

}  // namespace ingot
