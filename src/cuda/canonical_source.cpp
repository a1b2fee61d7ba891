#include "cuda/canonical_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

namespace ingot::cuda {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
bool starts_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
bool continues_name(char c) {
  return starts_name(c) || is_digit(c);
}

// Generated values: v, a number, and maybe a label behind an underscore.
bool is_value(std::string_view name) {
  size_t at = 1;
  while (at < name.size() && is_digit(name[at])) ++at;
  return name[0] == 'v' && at > 1 && (at == name.size() || name[at] == '_');
}

// "fused_linear_add_3_merge" becomes "fused_linear_add_merge".
std::string without_digits(std::string_view name) {
  std::string kept;
  for (const char c : name) {
    if (is_digit(c) || (c == '_' && !kept.empty() && kept.back() == '_')) continue;
    kept += c;
  }
  while (!kept.empty() && kept.back() == '_') kept.pop_back();
  return kept;
}

// What stands in a text beside white space: a name, a number, a quotation, or one other character.
// A comment is skipped with the spaces before it.
class Tokens {
 public:
  explicit Tokens(std::string_view text) : text_(text) {}

  // False at the end; `space` is what stands before the token.
  bool next(std::string_view* space, std::string_view* token) {
    const size_t start = at_;
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
    *space = text_.substr(start, at_ - start);
    if (text_.substr(at_, 2) == "//") {
      const size_t end = std::min(text_.find('\n', at_), text_.size());
      *space = space->substr(0, space->find_last_not_of(' ') + 1);
      at_ = end;
      *token = {};
      return true;
    }
    if (at_ == text_.size()) return false;
    const size_t begin = at_++;
    if (text_[begin] == '"') {
      at_ = std::min(text_.find('"', at_), text_.size() - 1) + 1;
    } else if (continues_name(text_[begin])) {
      const bool number = is_digit(text_[begin]);
      while (at_ < text_.size() && (continues_name(text_[at_]) || (number && text_[at_] == '.'))) {
        ++at_;
      }
    }
    *token = text_.substr(begin, at_ - begin);
    return true;
  }

 private:
  std::string_view text_;
  size_t at_ = 0;
};

// New names of functions and structs; those that would meet another name keep their own.
std::map<std::string, std::string> new_names(const std::string& text,
                                             const std::vector<std::string>& functions) {
  std::set<std::string> renamed(functions.begin(), functions.end()), all;
  std::string_view space, token, before;
  for (Tokens tokens(text); tokens.next(&space, &token); before = token) {
    if (token.empty() || !starts_name(token[0])) continue;
    all.emplace(token);
    if (before == "struct") renamed.emplace(token);
  }
  std::map<std::string, std::string> names;
  for (const std::string& name : renamed) {
    std::string shorter = without_digits(name);
    if (shorter != name && all.insert(shorter).second) names[name] = std::move(shorter);
  }
  return names;
}

}  // namespace

CanonicalSource canonical_source(const CompileRequest& source,
                                 const std::vector<std::string>& functions) {
  std::map<std::string, std::string> names = new_names(source.text, functions);
  const auto renamed = [&](const std::string& name) {
    const auto found = names.find(name);
    return found == names.end() ? name : found->second;
  };
  CanonicalSource result;
  result.request.name = without_digits(source.name);
  for (const std::string& function : functions) result.functions.push_back(renamed(function));
  size_t values = 0;
  std::string& text = result.request.text;
  std::string_view space, token;
  for (Tokens tokens(source.text); tokens.next(&space, &token);) {
    text += space;
    if (token.empty() || !starts_name(token[0])) {
      text += token;
      continue;
    }
    const std::string name(token);
    if (is_value(name) && !names.contains(name)) names[name] = fmt::format("v{}", values++);
    text += renamed(name);
  }
  text += space;
  return result;
}

}  // namespace ingot::cuda
