/* Stands for libcublas.so.13 and libcublasLt.so.13: computes fp32 products on the host, and keeps the
 * arguments of the last call of each function. Built by fake_cublas.py. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { kMost = 24, kFunctions = 32 };
typedef struct {
  const char* name;
  long calls;
  int64_t arguments[kMost];
} record;
static record records[kFunctions];

static record* record_of(const char* name) {
  for (int i = 0; i < kFunctions; ++i) {
    if (records[i].name == NULL) records[i].name = strdup(name);
    if (strcmp(records[i].name, name) == 0) return &records[i];
  }
  abort();
}
long fake_calls(const char* name) { return record_of(name)->calls; }
const int64_t* fake_arguments(const char* name) { return record_of(name)->arguments; }

#define RECORD(...)                                             \
  do {                                                          \
    const int64_t given[] = {__VA_ARGS__};                      \
    record* kept = record_of(__func__);                         \
    __atomic_add_fetch(&kept->calls, 1, __ATOMIC_SEQ_CST);      \
    memcpy(kept->arguments, given, sizeof(given));              \
  } while (0)
#define P(pointer) (int64_t)(uintptr_t)(pointer)

typedef struct {
  int math_mode, pointer_mode;
  void* stream;
} handle;

int cublasCreate_v2(handle** made) { return *made = calloc(1, sizeof(handle)), 0; }
int cublasDestroy_v2(handle* h) { return free(h), 0; }
int cublasSetStream_v2(handle* h, void* stream) { return h->stream = stream, 0; }
int cublasGetStream_v2(handle* h, void** stream) { return *stream = h->stream, 0; }
int cublasSetMathMode(handle* h, int mode) { return h->math_mode = mode, 0; }
int cublasGetMathMode(handle* h, int* mode) { return *mode = h->math_mode, 0; }
int cublasSetPointerMode_v2(handle* h, int mode) { return h->pointer_mode = mode, 0; }
int cublasGetPointerMode_v2(handle* h, int* mode) { return *mode = h->pointer_mode, 0; }

static void multiply(int ta, int tb, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
                     int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
  if (getenv("FAKE_IDLE")) return; /* only that it was called counts */
  double* column = malloc(sizeof(double) * (size_t)m);
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) column[i] = 0;
    for (int64_t p = 0; p < k; ++p) {
      const double factor = tb ? b[j + p * ldb] : b[p + j * ldb];
      if (ta) {
        for (int64_t i = 0; i < m; ++i) column[i] += a[p + i * lda] * factor;
      } else {
        for (int64_t i = 0; i < m; ++i) column[i] += a[i + p * lda] * factor;
      }
    }
    for (int64_t i = 0; i < m; ++i) {
      float* to = &c[i + j * ldc];
      *to = (float)(alpha * column[i] + (beta == 0 ? 0 : beta * (double)*to));
    }
  }
  free(column);
}

/* Wrong arguments are answered as the library does, so that an answer can be recognised. */
#define CHECK(h) \
  if ((h) == NULL) return 1; \
  if (m < 0 || n < 0 || k < 0) return 7

#define SGEMM(name, Int)                                                                           \
  int name(handle* h, int ta, int tb, Int m, Int n, Int k, const float* alpha, const float* a,     \
           Int lda, const float* b, Int ldb, const float* beta, float* c, Int ldc) {               \
    RECORD(P(h), ta, tb, m, n, k, P(alpha), P(a), lda, P(b), ldb, P(beta), P(c), ldc);             \
    CHECK(h);                                                                                      \
    return multiply(ta, tb, m, n, k, *alpha, a, lda, b, ldb, *beta, c, ldc), 0;                    \
  }
SGEMM(cublasSgemm_v2, int)
SGEMM(cublasSgemm_v2_64, int64_t)

#define STRIDED(name, Int)                                                                         \
  int name(handle* h, int ta, int tb, Int m, Int n, Int k, const float* alpha, const float* a,     \
           Int lda, long long sa, const float* b, Int ldb, long long sb, const float* beta,        \
           float* c, Int ldc, long long sc, Int batches) {                                         \
    RECORD(P(h), ta, tb, m, n, k, P(alpha), P(a), lda, sa, P(b), ldb, sb, P(beta), P(c), ldc, sc,  \
           batches);                                                                               \
    CHECK(h);                                                                                      \
    for (Int i = 0; i < batches; ++i) {                                                            \
      multiply(ta, tb, m, n, k, *alpha, a + i * sa, lda, b + i * sb, ldb, *beta, c + i * sc, ldc); \
    }                                                                                              \
    return 0;                                                                                      \
  }
STRIDED(cublasSgemmStridedBatched, int)
STRIDED(cublasSgemmStridedBatched_64, int64_t)

#define POINTERS(name, Int)                                                                        \
  int name(handle* h, int ta, int tb, Int m, Int n, Int k, const float* alpha,                     \
           const float* const* a, Int lda, const float* const* b, Int ldb, const float* beta,      \
           float* const* c, Int ldc, Int batches) {                                                \
    RECORD(P(h), ta, tb, m, n, k, P(alpha), P(a), lda, P(b), ldb, P(beta), P(c), ldc, batches);    \
    CHECK(h);                                                                                      \
    return 0;                                                                                      \
  }
POINTERS(cublasSgemmBatched, int)
POINTERS(cublasSgemmBatched_64, int64_t)

#define GEMM_EX(name, Int)                                                                         \
  int name(handle* h, int ta, int tb, Int m, Int n, Int k, const void* alpha, const void* a,       \
           int at, Int lda, const void* b, int bt, Int ldb, const void* beta, void* c, int ct,     \
           Int ldc, int compute, int algorithm) {                                                  \
    RECORD(P(h), ta, tb, m, n, k, P(alpha), P(a), at, lda, P(b), bt, ldb, P(beta), P(c), ct, ldc,  \
           compute, algorithm);                                                                    \
    CHECK(h);                                                                                      \
    if (at || bt || ct) return 0;                                                                  \
    return multiply(ta, tb, m, n, k, *(const float*)alpha, a, lda, b, ldb, *(const float*)beta, c, \
                    ldc),                                                                          \
           0;                                                                                      \
  }
GEMM_EX(cublasGemmEx, int)

/* Computed by another of the library's functions, as a library may. */
int cublasGemmEx_64(handle* h, int ta, int tb, int64_t m, int64_t n, int64_t k, const void* alpha,
                    const void* a, int at, int64_t lda, const void* b, int bt, int64_t ldb,
                    const void* beta, void* c, int ct, int64_t ldc, int compute, int algorithm) {
  RECORD(P(h), ta, tb, m, n, k, P(alpha), P(a), at, lda, P(b), bt, ldb, P(beta), P(c), ct, ldc,
         compute, algorithm);
  if (at || bt || ct) return 0;
  return cublasSgemm_v2_64(h, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

#define GEMM_STRIDED(name, Int)                                                                    \
  int name(handle* h, int ta, int tb, Int m, Int n, Int k, const void* alpha, const void* a,       \
           int at, Int lda, long long sa, const void* b, int bt, Int ldb, long long sb,            \
           const void* beta, void* c, int ct, Int ldc, long long sc, Int batches, int compute,     \
           int algorithm) {                                                                        \
    RECORD(P(h), ta, tb, m, n, k, P(alpha), P(a), at, lda, sa, P(b), bt, ldb, sb, P(beta), P(c),   \
           ct, ldc, sc, batches, compute, algorithm);                                              \
    CHECK(h);                                                                                      \
    if (at || bt || ct) return 0;                                                                  \
    for (Int i = 0; i < batches; ++i) {                                                            \
      multiply(ta, tb, m, n, k, *(const float*)alpha, (const float*)a + i * sa, lda,               \
               (const float*)b + i * sb, ldb, *(const float*)beta, (float*)c + i * sc, ldc);       \
    }                                                                                              \
    return 0;                                                                                      \
  }
GEMM_STRIDED(cublasGemmStridedBatchedEx, int)
GEMM_STRIDED(cublasGemmStridedBatchedEx_64, int64_t)

#define GEMM_POINTERS(name, Int)                                                                   \
  int name(handle* h, int ta, int tb, Int m, Int n, Int k, const void* alpha,                      \
           const void* const* a, int at, Int lda, const void* const* b, int bt, Int ldb,           \
           const void* beta, void* const* c, int ct, Int ldc, Int batches, int compute,            \
           int algorithm) {                                                                        \
    RECORD(P(h), ta, tb, m, n, k, P(alpha), P(a), at, lda, P(b), bt, ldb, P(beta), P(c), ct, ldc,  \
           batches, compute, algorithm);                                                           \
    CHECK(h);                                                                                      \
    return 0;                                                                                      \
  }
GEMM_POINTERS(cublasGemmBatchedEx, int)
GEMM_POINTERS(cublasGemmBatchedEx_64, int64_t)

/* cuBLASLt: a descriptor and a layout are arrays of attributes. */
typedef struct {
  int64_t values[40];
} attributes;

static int set(attributes* of, int which, const void* value, size_t bytes) {
  return memcpy(&of->values[which], value, bytes), 0;
}
static int get(attributes* of, int which, void* value, size_t bytes, size_t* written) {
  return memcpy(value, &of->values[which], *written = bytes), 0;
}
int cublasLtMatmulDescCreate(attributes** made, int compute, int scale) {
  *made = calloc(1, sizeof(attributes));
  (*made)->values[0] = compute, (*made)->values[1] = scale, (*made)->values[7] = 1;
  return (*made)->values[26] = -1, 0;
}
int cublasLtMatmulDescSetAttribute(attributes* of, int which, const void* value, size_t bytes) {
  return set(of, which, value, bytes);
}
int cublasLtMatmulDescGetAttribute(attributes* of, int which, void* value, size_t bytes,
                                   size_t* written) {
  return get(of, which, value, bytes, written);
}
int cublasLtMatrixLayoutCreate(attributes** made, int type, uint64_t rows, uint64_t columns,
                               int64_t leading) {
  *made = calloc(1, sizeof(attributes));
  int64_t* v = (*made)->values;
  v[0] = type, v[2] = (int64_t)rows, v[3] = (int64_t)columns, v[4] = leading, v[5] = 1;
  return 0;
}
int cublasLtMatrixLayoutSetAttribute(attributes* of, int which, const void* value, size_t bytes) {
  return set(of, which, value, bytes);
}
int cublasLtMatrixLayoutGetAttribute(attributes* of, int which, void* value, size_t bytes,
                                     size_t* written) {
  return get(of, which, value, bytes, written);
}
int cublasLtMatmul(void* h, attributes* how, const void* alpha, const void* a, attributes* al,
                   const void* b, attributes* bl, const void* beta, const void* c, attributes* cl,
                   void* d, attributes* dl, const void* algorithm, void* workspace, size_t bytes,
                   void* stream) {
  RECORD(P(h), P(how), P(alpha), P(a), P(al), P(b), P(bl), P(beta), P(c), P(cl), P(d), P(dl),
         P(algorithm), P(workspace), (int64_t)bytes, P(stream));
  return 0;
}
