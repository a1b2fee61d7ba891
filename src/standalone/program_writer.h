// The kernels of one program and the host functions that launch them.
#pragma once

#include <map>

#include "standalone/amalgamate.h"
#include "standalone/standalone.h"

namespace ingot::standalone {

struct ProgramText {
  std::vector<std::string> names;  // of its kernels
  std::string kernels;
  std::string host;
  std::map<std::string, std::string> splits;  // of its products
};

ProgramText write_program(const Request& request, Amalgamation& headers);

}  // namespace ingot::standalone
