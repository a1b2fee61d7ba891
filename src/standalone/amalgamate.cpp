#include "standalone/amalgamate.h"

#include <algorithm>
#include <stdexcept>

#include "codegen/embedded_kernels.h"

namespace ingot::standalone {
namespace {

constexpr std::string_view kInclude = "#include ";

std::string_view text_of(std::string_view path) {
  for (const EmbeddedKernel& header : embedded_kernels()) {
    if (header.path == path) return header.text;
  }
  throw std::logic_error("there is no header " + std::string(path) + " in kernels/");
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == '\n') text.remove_prefix(1);
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  return text;
}

}  // namespace

void Amalgamation::strip(std::string_view text, std::string* rest) {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line == "#pragma once") continue;
    if (!line.starts_with(kInclude)) {
      // Lines that went leave no pile of empty ones.
      if (!(line.empty() && rest->ends_with("\n\n"))) rest->append(line).push_back('\n');
      continue;
    }
    const std::string_view name = line.substr(kInclude.size());
    if (name.starts_with('"')) {
      add_header(name.substr(1, name.find('"', 1) - 1));
    } else {
      system_.emplace(name);
    }
  }
}

void Amalgamation::add_header(std::string_view path) {
  if (!added_.emplace(path).second) return;
  std::string own;
  strip(text_of(path), &own);
  std::string title = "// ---- " + std::string(path) + " ";
  title.append(title.size() < 100 ? 100 - title.size() : 0, '-');
  headers_ += title + "\n" + std::string(trimmed(own)) + "\n\n";
}

std::string Amalgamation::take_includes(std::string_view text) {
  std::string rest;
  strip(text, &rest);
  return std::string(trimmed(rest)) + "\n";
}

std::string Amalgamation::text() const {
  std::string text;
  for (const std::string& name : system_) text += std::string(kInclude) + name + "\n";
  return text + "\n" + headers_;
}

}  // namespace ingot::standalone
