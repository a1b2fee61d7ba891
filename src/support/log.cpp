#include "support/log.h"

#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_color_sinks.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <string_view>

namespace ingot {
namespace {

spdlog::level::level_enum level_of(LogLevel level) {
  switch (level) {
    case LogLevel::debug:
      return spdlog::level::debug;
    case LogLevel::info:
      return spdlog::level::info;
    case LogLevel::warning:
      return spdlog::level::warn;
    case LogLevel::error:
      return spdlog::level::err;
    case LogLevel::off:
      break;
  }
  return spdlog::level::off;
}

LogLevel level_of_environment() {
  const char* value = std::getenv("INGOT_LOG");
  const std::string_view name = value != nullptr ? value : "";
  if (name == "debug") return LogLevel::debug;
  if (name == "info") return LogLevel::info;
  if (name == "error") return LogLevel::error;
  if (name == "off") return LogLevel::off;
  return LogLevel::warning;
}

// Never destroyed: threads may log while the process ends. Not in spdlog's registry, which the host
// process may use for itself.
spdlog::logger& logger() {
  static spdlog::logger* const made = [] {
    auto* fresh =
        new spdlog::logger("ingot", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    fresh->set_pattern("%n: %^%l%$: %v");
    fresh->set_level(level_of(level_of_environment()));
    return fresh;
  }();
  return *made;
}

}  // namespace

bool logs(LogLevel level) {
  return logger().should_log(level_of(level));
}

void log_text(LogLevel level, const std::string& text) {
  logger().log(level_of(level), text);
}

void warn_once(const std::string& text) {
  static std::mutex mutex;
  static std::set<std::string> given;
  const std::lock_guard lock(mutex);
  if (given.insert(text).second) log_text(LogLevel::warning, text);
}

}  // namespace ingot
