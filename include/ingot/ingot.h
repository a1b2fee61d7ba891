/* The C ABI of libingot: everything above it (the C++ API in ingot.hpp, the Python front) is built
 * on these functions alone. The library knows nothing of PyTorch or Python.
 *
 * Conventions
 *  - Functions that can fail return an ingot_status; on failure ingot_last_error() gives, for the
 *    calling thread, one message that says what was wrong, where, and what to do.
 *  - Text that the library allocates is released with ingot_free().
 *  - A program may be used from several threads and on several streams at once; each call needs its
 *    own outputs and workspace. Nothing in ingot_program_run() synchronises with the device.
 */
#ifndef INGOT_INGOT_H_
#define INGOT_INGOT_H_

#include <stddef.h>
#include <stdint.h>

#if defined(INGOT_BUILD)
#define INGOT_API __attribute__((visibility("default")))
#else
#define INGOT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a change here would break a caller that was compiled, or written, against it. */
#define INGOT_ABI_VERSION 2

typedef enum ingot_status {
  INGOT_OK = 0,
  INGOT_INVALID_ARGUMENT = 1, /* the caller's data is wrong */
  INGOT_UNSUPPORTED = 2,      /* valid, but not something Ingot can do */
  INGOT_UNAVAILABLE = 3,      /* this machine lacks what it takes (driver, NVRTC, ...) */
  INGOT_FAILED = 4            /* the device or the system failed */
} ingot_status;

typedef enum ingot_dtype {
  INGOT_F32 = 0,
  INGOT_F64 = 1,
  INGOT_F16 = 2,
  INGOT_BF16 = 3,
  INGOT_I64 = 4,
  INGOT_BOOL = 5
} ingot_dtype;

/* A tensor in the caller's memory, as the graph's leaf or output of the same position sees it:
 * sizes and strides (in elements) over the graph's axes [batch, rows, groups, features]. */
typedef struct ingot_tensor {
  void* data;
  int64_t sizes[4];
  int64_t strides[4];
  int32_t dtype;  /* ingot_dtype */
  int32_t device; /* CUDA ordinal, or -1 for host memory */
} ingot_tensor;

typedef struct ingot_program ingot_program;

INGOT_API int ingot_abi_version(void);
INGOT_API const char* ingot_version(void);
INGOT_API const char* ingot_last_error(void);
INGOT_API void ingot_free(char* text);

/* Compiles a graph (docs/graph-format.md) for a target.
 * options: JSON object, all keys optional:
 *   "device": "cpu" | "cuda"  (default "cpu"),   "precision": "fp32" | "ieee" | "high" | "tf32" |
 *   "bf16" | "fp16",   "rewrite_level": "ieee" | "real",   "sm": compute capability to plan for
 *   where no GPU is present (90),   "cache_dir": path,   "streamed": true | false (default false):
 *   small, thin and deep fp32 products may be multiplied as their operands lie in memory, and each
 *   batch size compiles what it needs alone, for products of many shapes,   "scratch_results": true
 *   | false (default false): in no call does an output overlap with another tensor, so that until
 *   it is written its memory may hold what the workspace would,   "capabilities": masks CPU or GPU
 *   features for tests,   "product_choices": {key: configuration}, both as explain gives them under
 *   "tuning" ("library" and "estimated" are names too): in the place of what was measured or
 *   estimated. */
INGOT_API ingot_status ingot_program_create(const char* graph_json, const char* options_json,
                                            ingot_program** program);
INGOT_API void ingot_program_destroy(ingot_program* program);

/* Compiles every kernel that a call needs whose tensors are laid out like these (NULL: dense ones;
 * of their addresses only the alignment counts), for the GPU that the program was planned for, and
 * touches no device: safe on any thread, at any time, beside a stream that is being captured too. A
 * later prepare or run loads what is there. Nothing on the CPU. */
INGOT_API ingot_status ingot_program_compile(ingot_program* program, int64_t batch,
                                             const ingot_tensor* tensors, int count);

/* Compiles one more kernel, which a call with another batch size may need, under the same rules:
 * `compiled` is 0 where all are there. Called until then, it keeps any batch size from waiting for
 * a compiler. */
INGOT_API ingot_status ingot_program_compile_another(ingot_program* program, int64_t batch,
                                                     int* compiled);

/* Compiles and loads every kernel that a call with dense tensors of this batch size on this device
 * needs, so that a later run neither compiles nor allocates (CUDA graphs may then capture it).
 * device: -1 for host. */
INGOT_API ingot_status ingot_program_prepare(ingot_program* program, int64_t batch, int device);

/* Bytes of scratch memory (256-byte aligned, on the program's device) that a run with dense,
 * aligned tensors needs. */
INGOT_API ingot_status ingot_program_workspace_size(ingot_program* program, int64_t batch,
                                                    size_t* bytes);

/* Runs on `stream` (a CUstream; NULL is the default stream; ignored on the host). tensors: the
 * graph's leaves in order, then its outputs in order. Buffers named by "updates" are written. */
INGOT_API ingot_status ingot_program_run(ingot_program* program, int64_t batch,
                                         const ingot_tensor* tensors, int count, void* workspace,
                                         size_t workspace_bytes, void* stream);

/* Whether a run with tensors laid out like these would launch a library's product (cuBLASLt's): 1
 * or 0. Of their addresses only the alignment counts; no GPU is needed. A caller that has the
 * library itself does better to call it. */
INGOT_API ingot_status ingot_program_uses_library(ingot_program* program, int64_t batch,
                                                  const ingot_tensor* tensors, int count,
                                                  int* uses);

/* Prepares runs with tensors laid out like these, as ingot_program_prepare() does those with dense,
 * aligned ones: other layouts may take other kernels, and less scratch memory or more (on the host
 * for copies of matrices that a product cannot read or write as they lie). bytes: what such a run
 * then needs at least, in the place of ingot_program_workspace_size(). */
INGOT_API ingot_status ingot_program_prepare_call(ingot_program* program, int64_t batch,
                                                  const ingot_tensor* tensors, int count,
                                                  size_t* bytes);

/* What a call of the program binds and what it does to it, for every batch size, as JSON
 * (docs/signature-format.md): leaves and results in order with dtypes, shapes and layouts, which
 * buffers are written, workspace, what can be frozen, the precision of its products, a hash. */
INGOT_API ingot_status ingot_program_signature(ingot_program* program, char** json);

/* Frozen weights, for inference: parameters in the form that the product kernels read, made once
 * and kept by the caller, so that a run need not make it anew. Nothing notices a change of a
 * parameter afterwards: the caller freezes again. `frozen` is memory of the program's device,
 * aligned to 256 bytes, of ingot_program_frozen_size() bytes; 0 where there is nothing to keep
 * (with a library's product, where no weight is a parameter). It serves every batch size. */
INGOT_API ingot_status ingot_program_frozen_size(ingot_program* program, size_t* bytes);

/* Fills `frozen` on `stream` from tensors as a run takes them, and compiles what runs of this
 * batch size with frozen weights need. Reads the parameters alone. */
INGOT_API ingot_status ingot_program_freeze(ingot_program* program, int64_t batch,
                                            const ingot_tensor* tensors, int count, void* frozen,
                                            size_t frozen_bytes, void* stream);

/* ingot_program_run() with frozen weights; the parameters themselves must be given too. */
INGOT_API ingot_status ingot_program_run_frozen(ingot_program* program, int64_t batch,
                                                const ingot_tensor* tensors, int count,
                                                void* workspace, size_t workspace_bytes,
                                                const void* frozen, size_t frozen_bytes,
                                                void* stream);

/* The arguments of ingot_program_run(), or of ingot_program_run_frozen() where `frozen` is not
 * NULL, in memory that the caller keeps from call to call and changes in part: a foreign-function
 * interface pays for every argument. */
typedef struct ingot_call {
  ingot_program* program;
  int64_t batch;
  const ingot_tensor* tensors;
  int64_t count;
  void* workspace;
  size_t workspace_bytes;
  const void* frozen;
  size_t frozen_bytes;
  void* stream;
} ingot_call;
INGOT_API ingot_status ingot_program_call(const ingot_call* call);

/* What was done and why, as JSON (docs/explain-format.md): graph before and after, rewrites with
 * the identity each rests on, sweeps with bytes, flops, predicted time and reasons, kernel text. */
INGOT_API ingot_status ingot_program_explain(ingot_program* program, int64_t batch, char** json);

/* CUDA source that runs programs made for "cuda" without this library: kernels, headers and host
 * functions (src/standalone/standalone.h says what it exports). options: JSON object
 * {"names": [one a program, distinct identifiers], "leaf_strides": [per program a list of four
 * strides for each leaf, over the graph's axes; a program's list may be null: dense], "batches":
 * [per program the only batch size that it will be called with, or null; may be left out],
 * "contracted": [per program, a product of leaves with such a batch size, how much it contracts at
 * most, which a call gives in the batch's place, a multiple of eight; or null; may be left out]}.
 * Gives
 * {"common", "programs": [{"name", "kernels", "source"}]}: what all have in common, and behind it
 * the source of each. */
INGOT_API ingot_status ingot_standalone_source(const ingot_program* const* programs, int count,
                                               const char* options_json, char** json);

/* Evaluates the graph in double precision on host tensors, node by node, with no rewriting: the
 * reference for tests that have no PyTorch. Leaves may be of any dtype; outputs must be f64. */
INGOT_API ingot_status ingot_evaluate_fp64(const char* graph_json, int64_t batch,
                                           const ingot_tensor* tensors, int count);

/* Fp32 matrices whose addresses lie in an array, as cuBLAS's batches by pointers have them: `count`
 * of `lines` lines of `length` contiguous elements, `leading` apart; and `dense`, memory for them
 * behind one another, lines `dense_leading` apart. All of it, the array too, is the device's. */
typedef struct ingot_matrix_array {
  float* const* matrices;
  int64_t leading;
  float* dense;
  int64_t dense_leading;
  int64_t count, lines, length;
} ingot_matrix_array;

/* Compiles and loads what the two below launch. device: -1 for host. */
INGOT_API ingot_status ingot_matrix_array_prepare(int device);

/* dense = the matrices, on `stream`. */
INGOT_API ingot_status ingot_matrix_array_gather(const ingot_matrix_array* matrices, int device,
                                                 void* stream);

/* Each matrix = alpha · its part of dense + beta · itself; where a factor is 0, what it stands by
 * is not looked at, as in BLAS. Where alpha_at or beta_at is not NULL, the factor is what lies
 * there, on the device, when the stream comes to it. */
INGOT_API ingot_status ingot_matrix_array_scatter(const ingot_matrix_array* matrices, float alpha,
                                                  float beta, const float* alpha_at,
                                                  const float* beta_at, int device, void* stream);

/* What this machine offers, as JSON: GPUs, driver, NVRTC, cuBLASLt, CPU features, threads, cache.
 */
INGOT_API ingot_status ingot_doctor(char** json);

/* A row-major host matrix product c[m,n] = Σ_k a[m,k]·b[n,k] (transpose_b) or a[m,k]·b[k,n], with
 * leading dimensions in elements. row: NULL, or n elements that are added to each row of c before
 * it is rounded to `dtype`; asked for with f16 and bf16. Returns 0 on success, anything else where
 * it does not do that: c is then computed otherwise. */
typedef int (*ingot_product_fn)(int64_t m, int64_t n, int64_t k, const void* a, int64_t lda,
                                const void* b, int64_t ldb, int transpose_b, void* c, int64_t ldc,
                                const void* row, int32_t dtype, void* context);

/* Registers the host process's own product (PyTorch's, in a PyTorch process) under a name that
 * explain() shows. Passing NULL removes it. Safe while programs run: they finish with the old one.
 */
INGOT_API ingot_status ingot_set_host_product(const char* name, ingot_product_fn fn, void* context);

/* A BLAS as a host product: pass ingot_blas_product as `fn` and one of these, which must outlive
 * the registration, as `context`. Calls that the BLAS has no function for go to `other`, if there
 * is one. */
typedef struct ingot_blas {
  void* sgemm;           /* address of the Fortran sgemm (all arguments by pointer), or NULL */
  void* dgemm;           /* the same in double precision, or NULL */
  int32_t integer_bytes; /* size of its integers: 4 or 8 */
  ingot_product_fn other;
  void* other_context;
} ingot_blas;
INGOT_API int ingot_blas_product(int64_t m, int64_t n, int64_t k, const void* a, int64_t lda,
                                 const void* b, int64_t ldb, int transpose_b, void* c, int64_t ldc,
                                 const void* row, int32_t dtype, void* context);

/* Gives the library an open handle (dlopen) or path of the OpenMP runtime that the host process
 * already uses, so that both share one pool of threads. NULL: the library finds one itself. */
INGOT_API ingot_status ingot_set_host_threads(void* openmp_handle, int threads);

#ifdef __cplusplus
}
#endif
#endif
