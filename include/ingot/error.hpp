// The exception of the C++ API.
#ifndef INGOT_ERROR_HPP_
#define INGOT_ERROR_HPP_

#include <stdexcept>
#include <string>

#include "ingot/ingot.h"

namespace ingot {
inline namespace api {

class Error : public std::runtime_error {
 public:
  Error(ingot_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}
  ingot_status status() const { return status_; }

 private:
  ingot_status status_;
};

// Throws what the last failed call of this thread left behind.
inline void check(ingot_status status) {
  if (status == INGOT_OK) return;
  const char* message = ingot_last_error();
  throw Error(status, message == nullptr || *message == '\0' ? "ingot failed" : message);
}

}  // namespace api
}  // namespace ingot

#endif
