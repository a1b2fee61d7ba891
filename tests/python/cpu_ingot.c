/* A libingot.so whose programs, planned for a GPU, run on the CPU: the real library at
 * FAKE_REAL_INGOT does both (FAKE_IDLE: what runs computes nothing). FAKE_FAIL names a function that fails ("run", "prepare",
 * "gather", "scatter"). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "ingot/ingot.h"

struct ingot_program {
  ingot_program *planned, *run;
};

static void* real(const char* name) {
  static void* library;
  if (library == NULL) library = dlopen(getenv("FAKE_REAL_INGOT"), RTLD_NOW | RTLD_LOCAL);
  return dlsym(library, name);
}
#define REAL(name) ((__typeof__(&name))real(#name))

static int fails(const char* what) {
  const char* named = getenv("FAKE_FAIL");
  return named != NULL && strcmp(named, what) == 0;
}

/* Where Ingot's own calls of the library go. */
int fake_finds(void* library, void* expected) {
  return dlsym(library, "cublasLtMatmul") == expected;
}

/* Where the last run worked, and how many there were. */
static void* worked_in;
static long runs_so_far;
void* fake_workspace(void) { return worked_in; }
long fake_runs(void) { return runs_so_far; }

int ingot_abi_version(void) { return REAL(ingot_abi_version)(); }
const char* ingot_last_error(void) {
  return getenv("FAKE_FAIL") ? "as the test wished" : REAL(ingot_last_error)();
}
ingot_status ingot_program_create(const char* graph, const char* options, ingot_program** made) {
  const int tf32 = strstr(options, "tf32") != NULL;
  *made = calloc(1, sizeof(ingot_program));
  const ingot_status planned = REAL(ingot_program_create)(graph, options, &(*made)->planned);
  if (planned != INGOT_OK) return planned;
  return REAL(ingot_program_create)(
      graph, tf32 ? "{\"precision\": \"tf32\"}" : "{\"precision\": \"fp32\"}", &(*made)->run);
}
ingot_status ingot_program_uses_library(ingot_program* program, int64_t batch,
                                        const ingot_tensor* tensors, int count, int* uses) {
  return REAL(ingot_program_uses_library)(program->planned, batch, tensors, count, uses);
}
static const ingot_tensor* on_host(const ingot_tensor* tensors, int count, ingot_tensor host[8]) {
  for (int i = 0; i < count; ++i) {
    host[i] = tensors[i];
    host[i].device = -1;
  }
  return host;
}
ingot_status ingot_program_prepare_call(ingot_program* program, int64_t batch,
                                        const ingot_tensor* tensors, int count, size_t* bytes) {
  ingot_tensor host[8];
  if (fails("prepare")) return INGOT_FAILED;
  const ingot_status status = REAL(ingot_program_prepare_call)(
      program->run, batch, on_host(tensors, count, host), count, bytes);
  *bytes += ((size_t)4 << 20) + (size_t)batch * 8192; /* a GPU's program needs some */
  return status;
}
ingot_status ingot_program_run(ingot_program* program, int64_t batch, const ingot_tensor* tensors,
                               int count, void* workspace, size_t bytes, void* stream) {
  static __thread int runs;
  if (fails("run") || (fails("second run") && ++runs == 2)) return INGOT_FAILED;
  worked_in = workspace;
  __atomic_add_fetch(&runs_so_far, 1, __ATOMIC_SEQ_CST);
  if (getenv("FAKE_IDLE")) return INGOT_OK;
  ingot_tensor host[8];
  return REAL(ingot_program_run)(program->run, batch, on_host(tensors, count, host), count,
                                 workspace, bytes, stream);
}
ingot_status ingot_matrix_array_prepare(int device) { return device == 0 ? INGOT_OK : INGOT_FAILED; }
ingot_status ingot_matrix_array_gather(const ingot_matrix_array* matrices, int device,
                                       void* stream) {
  if (fails("gather") || device != 0) return INGOT_FAILED;
  return REAL(ingot_matrix_array_gather)(matrices, -1, stream);
}
ingot_status ingot_matrix_array_scatter(const ingot_matrix_array* matrices, float alpha, float beta,
                                        const float* alpha_at, const float* beta_at, int device,
                                        void* stream) {
  if (fails("scatter") || device != 0) return INGOT_FAILED;
  return REAL(ingot_matrix_array_scatter)(matrices, alpha, beta, alpha_at, beta_at, -1, stream);
}
