// Every function of include/ingot/ingot.h.
#include "ingot/ingot.h"

#include <cstdlib>
#include <cstring>

#include "api/explain.h"
#include "api/guard.h"
#include "api/program.h"
#include "api/signature.h"
#include "api/standalone.h"
#include "cpu/product/blas.h"
#include "graph/evaluate.h"
#include "graph/importer.h"
#include "support/log.h"
#include "support/threads.h"

namespace api = ingot::abi;

struct ingot_program {
  std::unique_ptr<api::Program> state;
};

namespace ingot::abi {

std::string& last_error() {
  static thread_local std::string message;
  return message;
}

char* new_text(const std::string& text) {
  auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr) throw std::bad_alloc();
  std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

namespace {

// Names may hold any bytes; what is not UTF-8 must not make a message impossible.
std::string dump(const nlohmann::json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

nlohmann::json describe_machine() {
  return {{"version", INGOT_VERSION},
          {"cpu", describe_cpu_machine()},
          {"cuda", describe_cuda_machine()}};
}

Program& program_of(ingot_program* handle) {
  require(handle != nullptr, "the program is NULL");
  return *handle->state;
}

void check_frozen(size_t needed, const void* frozen, size_t bytes) {
  if (needed == 0) return;
  if (frozen == nullptr || bytes < needed || reinterpret_cast<uintptr_t>(frozen) % 256 != 0) {
    fail(INGOT_INVALID_ARGUMENT,
         "frozen weights take {} bytes (ingot_program_frozen_size), aligned to 256; got {} at {}",
         needed, frozen == nullptr ? 0 : bytes, frozen);
  }
}

std::span<const ingot_tensor> tensors_of(const ingot_tensor* tensors, int64_t count) {
  require(count >= 0 && (tensors != nullptr || count == 0), "the tensors are NULL");
  return {tensors, static_cast<size_t>(count)};
}

void run(const ingot_call& call) {
  Program& state = program_of(call.program);
  const auto span = tensors_of(call.tensors, call.count);
  check_tensors(state, call.batch, span);
  if (call.frozen == nullptr) {
    state.executable->run(call.batch, span, call.workspace, call.workspace_bytes, call.stream);
    return;
  }
  check_frozen(state.executable->frozen_size(), call.frozen, call.frozen_bytes);
  state.executable->run_frozen(call.batch, span, call.workspace, call.workspace_bytes, call.frozen,
                               call.stream);
}

}  // namespace
}  // namespace ingot::abi

extern "C" {

int ingot_abi_version(void) {
  return INGOT_ABI_VERSION;
}
const char* ingot_version(void) {
  return INGOT_VERSION;
}
const char* ingot_last_error(void) {
  return api::last_error().c_str();
}
void ingot_free(char* text) {
  std::free(text);
}

ingot_status ingot_program_create(const char* graph_json, const char* options_json,
                                  ingot_program** program) {
  return api::guarded([&] {
    api::require(program != nullptr, "the place for the program is NULL");
    *program = nullptr;
    api::require(graph_json != nullptr, "the graph is NULL");
    auto state = api::make_program(graph_json, options_json == nullptr ? "" : options_json);
    ingot::log_line(ingot::LogLevel::debug, "{}: {} passes planned for {}", state->plan.graph.name,
                    state->plan.sweeps.size(), state->plan.target.name);
    *program = new ingot_program{std::move(state)};
  });
}

void ingot_program_destroy(ingot_program* program) {
  delete program;
}

ingot_status ingot_program_compile(ingot_program* program, int64_t batch,
                                   const ingot_tensor* tensors, int count) {
  return api::guarded([&] {
    api::Program& state = api::program_of(program);
    api::check_batch(state, batch);
    std::span<const ingot_tensor> span;
    if (tensors != nullptr) {
      span = api::tensors_of(tensors, count);
      api::check_tensors(state, batch, span);
    }
    state.executable->compile(batch, span);
  });
}

ingot_status ingot_program_compile_another(ingot_program* program, int64_t batch, int* compiled) {
  return api::guarded([&] {
    api::Program& state = api::program_of(program);
    api::check_batch(state, batch);
    api::require(compiled != nullptr, "the place for the answer is NULL");
    *compiled = state.executable->compile_another(batch) ? 1 : 0;
  });
}

ingot_status ingot_program_prepare(ingot_program* program, int64_t batch, int device) {
  return api::guarded([&] {
    api::Program& state = api::program_of(program);
    api::check_batch(state, batch);
    const bool cuda = state.options.device == ingot::Target::Device::cuda;
    if (cuda != (device >= 0)) {
      ingot::fail(INGOT_INVALID_ARGUMENT, "this program was made for \"{}\", not for device {}",
                  cuda ? "cuda" : "cpu", device);
    }
    state.executable->prepare(batch, device);
  });
}

ingot_status ingot_program_workspace_size(ingot_program* program, int64_t batch, size_t* bytes) {
  return api::guarded([&] {
    api::Program& state = api::program_of(program);
    api::check_batch(state, batch);
    api::require(bytes != nullptr, "the place for the size is NULL");
    *bytes = state.executable->workspace_size(batch);
  });
}

ingot_status ingot_program_run(ingot_program* program, int64_t batch, const ingot_tensor* tensors,
                               int count, void* workspace, size_t workspace_bytes, void* stream) {
  const ingot_call call = {program,         batch,   tensors, count, workspace,
                           workspace_bytes, nullptr, 0,       stream};
  return ingot_program_call(&call);
}

ingot_status ingot_program_uses_library(ingot_program* program, int64_t batch,
                                        const ingot_tensor* tensors, int count, int* uses) {
  return api::guarded([&] {
    api::Program& state = api::program_of(program);
    api::require(uses != nullptr, "the place for the answer is NULL");
    const auto span = api::tensors_of(tensors, count);
    api::check_tensors(state, batch, span);
    *uses = state.executable->uses_library(batch, span) ? 1 : 0;
  });
}

ingot_status ingot_program_prepare_call(ingot_program* program, int64_t batch,
                                        const ingot_tensor* tensors, int count, size_t* bytes) {
  return api::guarded([&] {
    api::Program& state = api::program_of(program);
    api::require(bytes != nullptr, "the place for the size is NULL");
    const auto span = api::tensors_of(tensors, count);
    api::check_tensors(state, batch, span);
    *bytes = state.executable->prepare_call(batch, span);
  });
}

ingot_status ingot_program_frozen_size(ingot_program* program, size_t* bytes) {
  return api::guarded([&] {
    api::Program& state = api::program_of(program);
    api::require(bytes != nullptr, "the place for the size is NULL");
    *bytes = state.executable->frozen_size();
  });
}

ingot_status ingot_program_freeze(ingot_program* program, int64_t batch,
                                  const ingot_tensor* tensors, int count, void* frozen,
                                  size_t frozen_bytes, void* stream) {
  return api::guarded([&] {
    api::Program& state = api::program_of(program);
    const auto span = api::tensors_of(tensors, count);
    api::check_tensors(state, batch, span);
    const size_t needed = state.executable->frozen_size();
    api::check_frozen(needed, frozen, frozen_bytes);
    if (needed != 0) state.executable->freeze(batch, span, frozen, stream);
  });
}

ingot_status ingot_program_run_frozen(ingot_program* program, int64_t batch,
                                      const ingot_tensor* tensors, int count, void* workspace,
                                      size_t workspace_bytes, const void* frozen,
                                      size_t frozen_bytes, void* stream) {
  return api::guarded([&] {
    const ingot_call call = {program,         batch,  tensors,      count, workspace,
                             workspace_bytes, frozen, frozen_bytes, stream};
    // A caller of this one says that there are frozen weights.
    api::check_frozen(api::program_of(program).executable->frozen_size(), frozen, frozen_bytes);
    api::run(call);
  });
}

ingot_status ingot_program_call(const ingot_call* call) {
  return api::guarded([&] {
    api::require(call != nullptr, "the call is NULL");
    api::run(*call);
  });
}

ingot_status ingot_program_signature(ingot_program* program, char** json) {
  return api::guarded([&] {
    api::Program& state = api::program_of(program);
    api::require(json != nullptr, "the place for the text is NULL");
    *json = api::new_text(api::dump(api::signature(state)));
  });
}

ingot_status ingot_program_explain(ingot_program* program, int64_t batch, char** json) {
  return api::guarded([&] {
    api::Program& state = api::program_of(program);
    api::check_batch(state, batch);
    api::require(json != nullptr, "the place for the text is NULL");
    *json = api::new_text(api::dump(api::explain(state, batch)));
  });
}

ingot_status ingot_standalone_source(const ingot_program* const* programs, int count,
                                     const char* options_json, char** json) {
  return api::guarded([&] {
    api::require(programs != nullptr && count > 0, "there are no programs");
    api::require(options_json != nullptr, "the options are NULL");
    api::require(json != nullptr, "the place for the text is NULL");
    std::vector<const api::Program*> states;
    for (int i = 0; i < count; ++i) {
      api::require(programs[i] != nullptr, "a program is NULL");
      states.push_back(programs[i]->state.get());
    }
    *json = api::new_text(api::dump(api::standalone_source(states, options_json)));
  });
}

ingot_status ingot_evaluate_fp64(const char* graph_json, int64_t batch, const ingot_tensor* tensors,
                                 int count) {
  return api::guarded([&] {
    api::require(graph_json != nullptr, "the graph is NULL");
    ingot::evaluate(ingot::import_graph(graph_json), batch, api::tensors_of(tensors, count));
  });
}

ingot_status ingot_doctor(char** json) {
  return api::guarded([&] {
    api::require(json != nullptr, "the place for the text is NULL");
    *json = api::new_text(api::dump(api::describe_machine()));
  });
}

ingot_status ingot_set_host_product(const char* name, ingot_product_fn fn, void* context) {
  return api::guarded([&] {
    api::require(fn == nullptr || name != nullptr, "the product's name is NULL");
    ingot::cpu::set_host_product(name == nullptr ? "" : name, fn, context);
  });
}

int ingot_blas_product(int64_t m, int64_t n, int64_t k, const void* a, int64_t lda, const void* b,
                       int64_t ldb, int transpose_b, void* c, int64_t ldc, const void* row,
                       int32_t dtype, void* context) {
  const auto& blas = *static_cast<const ingot_blas*>(context);
  const ingot::cpu::BlasFunctions functions{blas.sgemm, blas.dgemm, blas.integer_bytes};
  const ingot::cpu::ProductCall call{
      m, n, k, a, lda, b, ldb, transpose_b != 0, c, ldc, static_cast<ingot_dtype>(dtype)};
  if (row == nullptr && ingot::cpu::blas_takes(functions, call)) {
    ingot::cpu::blas_product(functions, call);
    return 0;
  }
  if (blas.other == nullptr) return 1;
  return blas.other(m, n, k, a, lda, b, ldb, transpose_b, c, ldc, row, dtype, blas.other_context);
}

ingot_status ingot_set_host_threads(void* openmp_handle, int threads) {
  return api::guarded([&] { ingot::set_host_threads(openmp_handle, threads); });
}

}  // extern "C"
