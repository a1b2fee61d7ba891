#include "standalone/standalone.h"

#include <fmt/format.h>

#include <map>
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

std::string exports(const std::string& name) {
  return fmt::format(
      "\nextern \"C\" __attribute__((visibility(\"default\"))) size_t workspace_{0}(\n"
      "    long long batch, const char** problem) {{\n  size_t bytes = 0;\n"
      "  *problem = ingot::standalone::guarded(\n"
      "      [&] {{ bytes = ingot::standalone::layout_{0}(batch).bytes; }});\n"
      "  return bytes;\n}}\n\n"
      "extern \"C\" __attribute__((visibility(\"default\"))) const char* run_{0}(\n"
      "    void* const* tensors, long long batch, void* workspace, size_t workspace_bytes,\n"
      "    void* stream) {{\n  using namespace ingot::standalone;\n"
      "  return guarded([&] {{\n"
      "    run_{0}(Call{{current_device(), tensors, batch, static_cast<unsigned "
      "char*>(workspace),\n"
      "                  workspace_bytes, static_cast<cudaStream_t>(stream)}});\n  }});\n}}\n",
      name);
}

}  // namespace

nlohmann::json write_source(std::span<const Request> requests) {
  Amalgamation headers;
  std::set<std::string> used;
  std::map<std::string, std::string> splits;
  nlohmann::json programs = nlohmann::json::array();
  for (const Request& request : requests) {
    Plan plan = *request.plan;
    make_names_unique(plan, request.name, used);
    Request own = request;
    own.plan = &plan;
    ProgramText text = write_program(own, headers);
    splits.merge(text.splits);
    programs.push_back({{"name", request.name},
                        {"kernels", text.names},
                        {"source", text.kernels +
                                       "// Launches: what happens in one call, in order.\n"
                                       "namespace ingot::standalone {\n\n" +
                                       text.host + "}  // namespace ingot::standalone\n" +
                                       exports(request.name)}});
  }
  std::string common = headers.text();
  if (!splits.empty()) common += write_splits(splits) + "\n";
  return {{"common", common}, {"programs", programs}};
}

}  // namespace ingot::standalone
