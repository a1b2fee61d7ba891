// The one exception of the library: a message for the user, and the status that the C ABI returns.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "ingot/ingot.h"

namespace ingot {

class Error : public std::runtime_error {
 public:
  Error(ingot_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}
  ingot_status status() const { return status_; }

 private:
  ingot_status status_;
};

template <class... Args>
[[noreturn]] void fail(ingot_status status, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(status, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace ingot
