// What the library says beside its results and errors, on stderr: compilations, cache misses,
// plans. INGOT_LOG=debug|info|warning|error|off, read once, sets the level; warning where it is
// unset.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>

namespace ingot {

enum class LogLevel { debug, info, warning, error, off };

bool logs(LogLevel level);
void log_text(LogLevel level, const std::string& text);
// A warning, the first time that a process has it to give.
void warn_once(const std::string& text);

template <class... Args>
void log_line(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (logs(level)) log_text(level, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace ingot
