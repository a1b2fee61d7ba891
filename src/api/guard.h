// The border of the C ABI: no exception crosses it, and each thread keeps its last error.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "ingot/ingot.h"
#include "support/error.h"

namespace ingot::abi {

// The calling thread's message; empty before its first error.
std::string& last_error();

inline ingot_status record(ingot_status status, const char* message) noexcept {
  try {
    last_error() = message;
  } catch (...) {
    // Out of memory: the status alone must do.
  }
  return status;
}

// Runs body() and turns what it throws into a status.
template <class Body>
ingot_status guarded(Body&& body) noexcept {
  try {
    body();
    return INGOT_OK;
  } catch (const Error& error) {
    return record(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return record(INGOT_FAILED, "out of host memory");
  } catch (const std::exception& error) {
    return record(INGOT_FAILED, error.what());
  } catch (...) {
    return record(INGOT_FAILED, "an unknown exception was thrown");
  }
}

// A copy that ingot_free() releases.
char* new_text(const std::string& text);

inline void require(bool holds, std::string_view what) {
  if (!holds) fail(INGOT_INVALID_ARGUMENT, "{}", what);
}

}  // namespace ingot::abi
