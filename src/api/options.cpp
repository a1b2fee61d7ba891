#include "api/options.h"

#include "support/error.h"
#include "support/json.h"

namespace ingot::abi {
namespace {

using nlohmann::json;

const std::string& text_of(const std::string& key, const json& value) {
  if (!value.is_string()) {
    fail(INGOT_INVALID_ARGUMENT, "option '{}' must be a string, got {}", key, shown(value));
  }
  return value.get_ref<const std::string&>();
}

[[noreturn]] void unknown_value(const std::string& key, const std::string& value,
                                std::string_view known) {
  fail(INGOT_INVALID_ARGUMENT, "option '{}' is '{}', but must be one of {}", key, value, known);
}

void set_device(ProgramOptions& options, const std::string& key, const json& value) {
  const std::string& name = text_of(key, value);
  if (name != "cpu" && name != "cuda") unknown_value(key, name, "cpu, cuda");
  options.device = name == "cuda" ? Target::Device::cuda : Target::Device::cpu;
}

void set_precision(ProgramOptions& options, const std::string& key, const json& value) {
  try {
    options.precision = precision_from(text_of(key, value));
  } catch (const Error& error) {
    fail(error.status(), "option '{}': {}", key, error.what());
  }
}

void set_rewrite_level(ProgramOptions& options, const std::string& key, const json& value) {
  const std::string& name = text_of(key, value);
  if (name != "ieee" && name != "real") unknown_value(key, name, "ieee, real");
  options.real_rewrites = name == "real";
}

void set_sm(ProgramOptions& options, const std::string& key, const json& value) {
  if (!value.is_number_integer() || value.get<int64_t>() < 50 || value.get<int64_t>() > 999) {
    fail(INGOT_INVALID_ARGUMENT,
         "option '{}' must be a compute capability without its dot (90 for 9.0), got {}", key,
         shown(value));
  }
  options.sm = value.get<int>();
}

void set_cache_dir(ProgramOptions& options, const std::string& key, const json& value) {
  options.cache_dir = text_of(key, value);
}

bool truth_of(const std::string& key, const json& value) {
  if (!value.is_boolean()) {
    fail(INGOT_INVALID_ARGUMENT, "option '{}' must be true or false, got {}", key, shown(value));
  }
  return value;
}

void set_streamed(ProgramOptions& options, const std::string& key, const json& value) {
  options.streamed = truth_of(key, value);
}

void set_scratch_results(ProgramOptions& options, const std::string& key, const json& value) {
  options.scratch_results = truth_of(key, value);
}

void set_capabilities(ProgramOptions& options, const std::string& key, const json& value) {
  if (!value.is_object()) {
    fail(INGOT_INVALID_ARGUMENT, "option '{}' must be an object, got {}", key, shown(value));
  }
  options.capabilities = value;
}

void set_product_choices(ProgramOptions& options, const std::string& key, const json& value) {
  bool texts = value.is_object();
  for (const json& name : value) texts = texts && name.is_string();
  if (!texts) {
    fail(INGOT_INVALID_ARGUMENT, "option '{}' must be an object of strings, got {}", key,
         shown(value));
  }
  options.product_choices = value;
}

struct Option {
  const char* key;
  void (*set)(ProgramOptions&, const std::string& key, const json& value);
};
constexpr Option kOptions[] = {
    {"device", set_device},
    {"precision", set_precision},
    {"rewrite_level", set_rewrite_level},
    {"sm", set_sm},
    {"cache_dir", set_cache_dir},
    {"streamed", set_streamed},
    {"scratch_results", set_scratch_results},
    {"capabilities", set_capabilities},
    {"product_choices", set_product_choices},
};

}  // namespace

ProgramOptions parse_options(std::string_view text) {
  ProgramOptions options;
  if (text.empty()) return options;
  const json object = parse_json(text, "the text of the options");
  if (!object.is_object()) {
    fail(INGOT_INVALID_ARGUMENT, "the options must be a JSON object, got {}", shown(object));
  }
  for (const auto& [key, value] : object.items()) {
    const Option* found = nullptr;
    std::string known;
    for (const Option& option : kOptions) {
      if (key == option.key) found = &option;
      known += (known.empty() ? "" : ", ") + std::string(option.key);
    }
    if (found == nullptr) {
      fail(INGOT_INVALID_ARGUMENT, "there is no option '{}'; known are {}", key, known);
    }
    found->set(options, key, value);
  }
  return options;
}

json to_json(const ProgramOptions& options) {
  return {{"device", options.device == Target::Device::cuda ? "cuda" : "cpu"},
          {"precision", name_of(options.precision)},
          {"rewrite_level", options.real_rewrites ? "real" : "ieee"},
          {"sm", options.sm},
          {"cache_dir", options.cache_dir},
          {"streamed", options.streamed},
          {"scratch_results", options.scratch_results},
          {"capabilities", options.capabilities},
          {"product_choices", options.product_choices}};
}

}  // namespace ingot::abi
