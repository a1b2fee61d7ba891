// Many headers of kernels/ as one text.
#pragma once

#include <set>
#include <string>
#include <string_view>

namespace ingot::standalone {

// Collects headers, what they include before them, each once.
class Amalgamation {
 public:
  // path as an #include names it.
  void add_header(std::string_view path);
  // The includes of a generated text are added; the rest of the text is returned.
  std::string take_includes(std::string_view text);

  // System includes, then the headers, each under a line with its path.
  std::string text() const;

 private:
  // Appends all lines but #pragma once and #include.
  void strip(std::string_view text, std::string* rest);

  std::set<std::string, std::less<>> added_;
  std::set<std::string, std::less<>> system_;
  std::string headers_;
};

}  // namespace ingot::standalone
