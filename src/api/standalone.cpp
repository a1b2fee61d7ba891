#include "api/standalone.h"

#include <algorithm>
#include <cctype>
#include <optional>
#include <set>

#include "standalone/standalone.h"
#include "support/error.h"
#include "support/json.h"

namespace ingot::abi {
namespace {

using nlohmann::json;

bool is_identifier(const std::string& text) {
  const auto allowed = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; };
  return !text.empty() && std::isdigit(static_cast<unsigned char>(text[0])) == 0 &&
         std::all_of(text.begin(), text.end(), allowed);
}

std::vector<std::array<int64_t, kAxes>> strides_of(const json& given, size_t leaves) {
  std::vector<std::array<int64_t, kAxes>> strides;
  if (given.is_null()) return strides;
  try {
    strides = given.get<std::vector<std::array<int64_t, kAxes>>>();
  } catch (const json::exception&) {
    fail(INGOT_INVALID_ARGUMENT, "option 'leaf_strides' must hold lists of four integers");
  }
  if (strides.size() != leaves) {
    fail(INGOT_INVALID_ARGUMENT, "option 'leaf_strides' has {} entries for {} leaves",
         strides.size(), leaves);
  }
  return strides;
}

std::optional<int64_t> size_of(const json& given, const char* key) {
  if (given.is_null()) return {};
  if (!given.is_number_integer() || given.get<int64_t>() < 1) {
    fail(INGOT_INVALID_ARGUMENT, "option '{}': {} is no size", key, shown(given));
  }
  return given.get<int64_t>();
}

}  // namespace

json standalone_source(std::span<const Program* const> programs, std::string_view options_json) {
  const json options = parse_json(options_json, "the text of the options");
  const auto listed = [&](const char* key) {
    const json list = options.is_object() ? options.value(key, json()) : json();
    if (!list.is_array() || list.size() != programs.size()) {
      fail(INGOT_INVALID_ARGUMENT, "option '{}' must be a list with one entry a program", key);
    }
    return list;
  };
  const json names = listed("names"), strides = listed("leaf_strides");
  const auto listed_or_null = [&](const char* key) {
    return options.contains(key) ? listed(key) : json(programs.size(), json());
  };
  const json batches = listed_or_null("batches"), contracted = listed_or_null("contracted");
  std::vector<standalone::Request> requests;
  std::set<std::string> known;
  for (size_t i = 0; i < programs.size(); ++i) {
    const Program& program = *programs[i];
    if (program.options.device != Target::Device::cuda) {
      fail(INGOT_INVALID_ARGUMENT, "program {} was made for the CPU; a standalone file holds CUDA",
           i);
    }
    const std::string name = names[i].is_string() ? names[i].get<std::string>() : "";
    if (!is_identifier(name) || !known.insert(name).second) {
      fail(INGOT_INVALID_ARGUMENT, "option 'names': {} is no identifier, or there twice",
           shown(names[i]));
    }
    requests.push_back({&program.plan, name, strides_of(strides[i], program.leaves.size()),
                        size_of(batches[i], "batches"), size_of(contracted[i], "contracted")});
    if (requests.back().contracted && !requests.back().batch) {
      fail(INGOT_INVALID_ARGUMENT, "option 'contracted': program {} has no batch of its own", i);
    }
  }
  return standalone::write_source(requests);
}

}  // namespace ingot::abi
