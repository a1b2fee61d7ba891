#include "standalone/standalone.h"

#include <set>

#include "codegen/sweep_writers.h"
#include "standalone/product_writer.h"
#include "standalone/program_writer.h"

namespace ingot::standalone {
namespace {

// Sweeps of later programs whose kernels would share a name with an earlier one's get their
// program's.
void make_names_unique(Plan& plan, const std::string& program, std::set<std::string>& used) {
  std::set<std::string> own;
  for (size_t i = 0; i < plan.sweeps.size(); ++i) {
    Sweep& sweep = plan.sweeps[i];
    if (used.contains(kernel_name(plan, static_cast<int>(i)))) sweep.name += "_" + program;
    own.insert(kernel_name(plan, static_cast<int>(i)));
  }
  used.merge(own);
}

}  // namespace

nlohmann::json write_source(std::span<const Request> requests) {
  Amalgamation headers;
  std::set<std::string> used;
  ProductTables products;
  nlohmann::json programs = nlohmann::json::array();
  for (const Request& request : requests) {
    Plan plan = *request.plan;
    make_names_unique(plan, request.name, used);
    Request own = request;
    own.plan = &plan;
    ProgramText text = write_program(own, headers, products);
    programs.push_back({{"name", request.name},
                        {"kernels", text.names},
                        {"source", text.kernels + "namespace ingot::standalone {\n\n" + text.host +
                                       "}  // namespace ingot::standalone\n"}});
  }
  return {{"common", headers.text() + products.text()}, {"programs", programs}};
}

}  // namespace ingot::standalone
