#include "codegen/type_names.h"

#include <fmt/format.h>

#include <cctype>

namespace ingot {

std::string compute_type(DType dtype) {
  if (dtype == DType::f64) return "double";
  if (dtype == DType::i64) return "i64";
  return "float";
}

std::string storage_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f64:
      return "f64";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::i64:
      return "i64";
    case DType::boolean:
      return "boolean";
  }
  return "f32";
}

std::string identifier(std::string_view text) {
  std::string result;
  for (const char c : text) {
    const bool allowed = std::isalnum(static_cast<unsigned char>(c)) != 0;
    if (allowed)
      result.push_back(c);
    else if (!result.empty() && result.back() != '_')
      result.push_back('_');
  }
  while (!result.empty() && result.back() == '_') result.pop_back();
  return result;
}

std::string monoid_type(MonoidKind monoid, const std::string& value_type) {
  const char* name = "";
  switch (monoid) {
    case MonoidKind::sum:
      name = "Sum";
      break;
    case MonoidKind::max:
      name = "Max";
      break;
    case MonoidKind::min:
      name = "Min";
      break;
    case MonoidKind::argmax:
      name = "ArgMax";
      break;
    case MonoidKind::moments:
      name = "Moments";
      break;
    case MonoidKind::log_sum_exp:
      name = "LogSumExp";
      break;
    case MonoidKind::average:
      name = "Average";
      break;
  }
  return fmt::format("{}<{}>", name, value_type);
}

std::string finish_expression(Finish finish, const std::string& monoid, const std::string& state) {
  const char* reader = "value";
  switch (finish) {
    case Finish::sum:
    case Finish::max:
    case Finish::min:
    case Finish::log_sum_exp:
      break;
    case Finish::argmax:
      reader = "index";
      break;
    case Finish::mean:
      reader = "mean";
      break;
    case Finish::variance:
      reader = "variance";
      break;
    case Finish::variance_unbiased:
      reader = "variance_unbiased";
      break;
    case Finish::max_exponent:
      reader = "maximum";
      break;
    case Finish::sum_exp:
      reader = "sum_exp";
      break;
  }
  return fmt::format("{}::{}({})", monoid, reader, state);
}

std::string together_member(size_t index) {
  std::string member;
  for (size_t i = 0; i < index; ++i) member += ".others";
  return member + ".first";
}

int64_t state_bytes(MonoidKind monoid, const std::string& value_type) {
  const int64_t value = value_type == "float" ? 4 : 8;
  const bool pair = monoid == MonoidKind::log_sum_exp || monoid == MonoidKind::argmax ||
                    monoid == MonoidKind::average;
  const int64_t words = monoid == MonoidKind::moments ? 3 : pair ? 2 : 1;
  const bool wide = monoid == MonoidKind::argmax || value == 8;
  return words * (wide ? 8 : value);
}

}  // namespace ingot
