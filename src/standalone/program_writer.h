// The kernels of one program and the host functions that launch them.
#pragma once

#include "standalone/amalgamate.h"
#include "standalone/product_writer.h"
#include "standalone/standalone.h"

namespace ingot::standalone {

struct ProgramText {
  std::vector<std::string> names;  // of its kernels
  std::string kernels;
  std::string host;
};

ProgramText write_program(const Request& request, Amalgamation& headers, ProductTables& tables);

}  // namespace ingot::standalone
