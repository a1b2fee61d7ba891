// The products of cuBLAS. Those of other types than fp32 are handed on at once.
#include "blas/hook.h"

namespace ingot::blas {
namespace {

template <class Int>
using Sgemm = Status(Handle, int, int, Int, Int, Int, const float*, const float*, Int, const float*,
                     Int, const float*, float*, Int);
template <class Int>
using SgemmStrided = Status(Handle, int, int, Int, Int, Int, const float*, const float*, Int,
                            long long, const float*, Int, long long, const float*, float*, Int,
                            long long, Int);
template <class Int>
using SgemmPointers = Status(Handle, int, int, Int, Int, Int, const float*, const float* const*,
                             Int, const float* const*, Int, const float*, float* const*, Int, Int);
template <class Int>
using GemmEx = Status(Handle, int, int, Int, Int, Int, const void*, const void*, int, Int,
                      const void*, int, Int, const void*, void*, int, Int, int, int);
template <class Int>
using GemmStrided = Status(Handle, int, int, Int, Int, Int, const void*, const void*, int, Int,
                           long long, const void*, int, Int, long long, const void*, void*, int,
                           Int, long long, Int, int, int);
template <class Int>
using GemmPointers = Status(Handle, int, int, Int, Int, Int, const void*, const void* const*, int,
                            Int, const void* const*, int, Int, const void*, void* const*, int, Int,
                            Int, int, int);

bool all_fp32(int a, int b, int c) {
  return a == kR32f && b == kR32f && c == kR32f;
}

// The arrays stand for what they point to, which lies on the device: NULL is refused alike.
Product by_pointers(int ta, int tb, int64_t m, int64_t n, int64_t k, const Pointers& of,
                    int64_t lda, int64_t ldb, int64_t ldc, int64_t batches) {
  const auto stand_in = [](const void* array) {
    return const_cast<float*>(static_cast<const float*>(array));
  };
  return {ta,  tb, m,      n, k, stand_in(of.a), lda, 0, stand_in(of.b), ldb, 0, stand_in(of.c),
          ldc, 0,  batches};
}

template <class Int>
Status sgemm(Real<Sgemm<Int>>& real, Handle handle, int ta, int tb, Int m, Int n, Int k,
             const float* alpha, const float* a, Int lda, const float* b, Int ldb,
             const float* beta, float* c, Int ldc) {
  const auto rest = [&](int64_t) {
    return hand_on(real, handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  };
  if (passes_through()) return rest(0);
  const Product product = {ta, tb, m, n, k, a, lda, 0, b, ldb, 0, c, ldc, 0, 1};
  return take_or_hand_on({real.name(), handle, kCompute32f, alpha, beta}, product, rest);
}

template <class Int>
Status sgemm_strided(Real<SgemmStrided<Int>>& real, Handle handle, int ta, int tb, Int m, Int n,
                     Int k, const float* alpha, const float* a, Int lda, long long stride_a,
                     const float* b, Int ldb, long long stride_b, const float* beta, float* c,
                     Int ldc, long long stride_c, Int batches) {
  const auto rest = [&](int64_t done) {
    return hand_on(real, handle, ta, tb, m, n, k, alpha, a + done * stride_a, lda, stride_a,
                   b + done * stride_b, ldb, stride_b, beta, c + done * stride_c, ldc, stride_c,
                   static_cast<Int>(batches - done));
  };
  if (passes_through()) return rest(0);
  const Product product = {ta, tb,  m,        n, k,   a,        lda,    stride_a,
                           b,  ldb, stride_b, c, ldc, stride_c, batches};
  return take_or_hand_on({real.name(), handle, kCompute32f, alpha, beta}, product, rest);
}

template <class Int>
Status sgemm_pointers(Real<SgemmPointers<Int>>& real, Handle handle, int ta, int tb, Int m, Int n,
                      Int k, const float* alpha, const float* const* a, Int lda,
                      const float* const* b, Int ldb, const float* beta, float* const* c, Int ldc,
                      Int batches) {
  const auto rest = [&](int64_t) {
    return hand_on(real, handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, batches);
  };
  if (passes_through()) return rest(0);
  const Pointers pointers = {a, b, c};
  return take_or_hand_on({real.name(), handle, kCompute32f, alpha, beta, pointers},
                         by_pointers(ta, tb, m, n, k, pointers, lda, ldb, ldc, batches), rest);
}

template <class Int>
Status gemm_ex(Real<GemmEx<Int>>& real, Handle handle, int ta, int tb, Int m, Int n, Int k,
               const void* alpha, const void* a, int type_a, Int lda, const void* b, int type_b,
               Int ldb, const void* beta, void* c, int type_c, Int ldc, int compute,
               int algorithm) {
  const auto rest = [&](int64_t) {
    return hand_on(real, handle, ta, tb, m, n, k, alpha, a, type_a, lda, b, type_b, ldb, beta, c,
                   type_c, ldc, compute, algorithm);
  };
  if (passes_through()) return rest(0);
  if (!all_fp32(type_a, type_b, type_c)) {
    count_other();
    const BelowHook below;
    return rest(0);
  }
  const Product product = {ta,  tb, m,
                           n,   k,  static_cast<const float*>(a),
                           lda, 0,  static_cast<const float*>(b),
                           ldb, 0,  static_cast<float*>(c),
                           ldc, 0,  1};
  return take_or_hand_on({real.name(), handle, compute, alpha, beta}, product, rest);
}

template <class Int>
Status gemm_strided(Real<GemmStrided<Int>>& real, Handle handle, int ta, int tb, Int m, Int n,
                    Int k, const void* alpha, const void* a, int type_a, Int lda,
                    long long stride_a, const void* b, int type_b, Int ldb, long long stride_b,
                    const void* beta, void* c, int type_c, Int ldc, long long stride_c, Int batches,
                    int compute, int algorithm) {
  const auto *fa = static_cast<const float*>(a), *fb = static_cast<const float*>(b);
  auto* const fc = static_cast<float*>(c);
  const auto rest = [&](int64_t done) {  // of other types than fp32 none is ever done
    return hand_on(real, handle, ta, tb, m, n, k, alpha,
                   static_cast<const void*>(fa + done * stride_a), type_a, lda, stride_a,
                   static_cast<const void*>(fb + done * stride_b), type_b, ldb, stride_b, beta,
                   static_cast<void*>(fc + done * stride_c), type_c, ldc, stride_c,
                   static_cast<Int>(batches - done), compute, algorithm);
  };
  if (passes_through()) return rest(0);
  if (!all_fp32(type_a, type_b, type_c)) {
    count_other();
    const BelowHook below;
    return rest(0);
  }
  const Product product = {ta, tb,  m,        n,  k,   fa,       lda,    stride_a,
                           fb, ldb, stride_b, fc, ldc, stride_c, batches};
  return take_or_hand_on({real.name(), handle, compute, alpha, beta}, product, rest);
}

template <class Int>
Status gemm_pointers(Real<GemmPointers<Int>>& real, Handle handle, int ta, int tb, Int m, Int n,
                     Int k, const void* alpha, const void* const* a, int type_a, Int lda,
                     const void* const* b, int type_b, Int ldb, const void* beta, void* const* c,
                     int type_c, Int ldc, Int batches, int compute, int algorithm) {
  const auto rest = [&](int64_t) {
    return hand_on(real, handle, ta, tb, m, n, k, alpha, a, type_a, lda, b, type_b, ldb, beta, c,
                   type_c, ldc, batches, compute, algorithm);
  };
  if (passes_through()) return rest(0);
  if (!all_fp32(type_a, type_b, type_c)) {
    count_other();
    const BelowHook below;
    return rest(0);
  }
  const Pointers pointers = {reinterpret_cast<const float* const*>(a),
                             reinterpret_cast<const float* const*>(b),
                             reinterpret_cast<float* const*>(c)};
  return take_or_hand_on({real.name(), handle, compute, alpha, beta, pointers},
                         by_pointers(ta, tb, m, n, k, pointers, lda, ldb, ldc, batches), rest);
}

}  // namespace
}  // namespace ingot::blas

#define INGOT_EXPORT extern "C" [[gnu::visibility("default")]] ingot::blas::Status

using ingot::blas::Handle;
using ingot::blas::Real;

#define INGOT_SGEMM(name, Int)                                                                     \
  static constinit Real<ingot::blas::Sgemm<Int>> real_##name(#name);                               \
  INGOT_EXPORT name(Handle handle, int ta, int tb, Int m, Int n, Int k, const float* alpha,        \
                    const float* a, Int lda, const float* b, Int ldb, const float* beta, float* c, \
                    Int ldc) {                                                                     \
    return ingot::blas::sgemm<Int>(real_##name, handle, ta, tb, m, n, k, alpha, a, lda, b, ldb,    \
                                   beta, c, ldc);                                                  \
  }

#define INGOT_SGEMM_STRIDED(name, Int)                                                            \
  static constinit Real<ingot::blas::SgemmStrided<Int>> real_##name(#name);                       \
  INGOT_EXPORT name(Handle handle, int ta, int tb, Int m, Int n, Int k, const float* alpha,       \
                    const float* a, Int lda, long long stride_a, const float* b, Int ldb,         \
                    long long stride_b, const float* beta, float* c, Int ldc, long long stride_c, \
                    Int batches) {                                                                \
    return ingot::blas::sgemm_strided<Int>(real_##name, handle, ta, tb, m, n, k, alpha, a, lda,   \
                                           stride_a, b, ldb, stride_b, beta, c, ldc, stride_c,    \
                                           batches);                                              \
  }

#define INGOT_SGEMM_POINTERS(name, Int)                                                          \
  static constinit Real<ingot::blas::SgemmPointers<Int>> real_##name(#name);                     \
  INGOT_EXPORT name(Handle handle, int ta, int tb, Int m, Int n, Int k, const float* alpha,      \
                    const float* const* a, Int lda, const float* const* b, Int ldb,              \
                    const float* beta, float* const* c, Int ldc, Int batches) {                  \
    return ingot::blas::sgemm_pointers<Int>(real_##name, handle, ta, tb, m, n, k, alpha, a, lda, \
                                            b, ldb, beta, c, ldc, batches);                      \
  }

#define INGOT_GEMM_EX(name, Int)                                                                  \
  static constinit Real<ingot::blas::GemmEx<Int>> real_##name(#name);                             \
  INGOT_EXPORT name(Handle handle, int ta, int tb, Int m, Int n, Int k, const void* alpha,        \
                    const void* a, int type_a, Int lda, const void* b, int type_b, Int ldb,       \
                    const void* beta, void* c, int type_c, Int ldc, int compute, int algorithm) { \
    return ingot::blas::gemm_ex<Int>(real_##name, handle, ta, tb, m, n, k, alpha, a, type_a, lda, \
                                     b, type_b, ldb, beta, c, type_c, ldc, compute, algorithm);   \
  }

#define INGOT_GEMM_STRIDED(name, Int)                                                             \
  static constinit Real<ingot::blas::GemmStrided<Int>> real_##name(#name);                        \
  INGOT_EXPORT name(Handle handle, int ta, int tb, Int m, Int n, Int k, const void* alpha,        \
                    const void* a, int type_a, Int lda, long long stride_a, const void* b,        \
                    int type_b, Int ldb, long long stride_b, const void* beta, void* c,           \
                    int type_c, Int ldc, long long stride_c, Int batches, int compute,            \
                    int algorithm) {                                                              \
    return ingot::blas::gemm_strided<Int>(real_##name, handle, ta, tb, m, n, k, alpha, a, type_a, \
                                          lda, stride_a, b, type_b, ldb, stride_b, beta, c,       \
                                          type_c, ldc, stride_c, batches, compute, algorithm);    \
  }

#define INGOT_GEMM_POINTERS(name, Int)                                                             \
  static constinit Real<ingot::blas::GemmPointers<Int>> real_##name(#name);                        \
  INGOT_EXPORT name(Handle handle, int ta, int tb, Int m, Int n, Int k, const void* alpha,         \
                    const void* const* a, int type_a, Int lda, const void* const* b, int type_b,   \
                    Int ldb, const void* beta, void* const* c, int type_c, Int ldc, Int batches,   \
                    int compute, int algorithm) {                                                  \
    return ingot::blas::gemm_pointers<Int>(real_##name, handle, ta, tb, m, n, k, alpha, a, type_a, \
                                           lda, b, type_b, ldb, beta, c, type_c, ldc, batches,     \
                                           compute, algorithm);                                    \
  }

INGOT_SGEMM(cublasSgemm_v2, int)
INGOT_SGEMM(cublasSgemm_v2_64, int64_t)
INGOT_SGEMM_STRIDED(cublasSgemmStridedBatched, int)
INGOT_SGEMM_STRIDED(cublasSgemmStridedBatched_64, int64_t)
INGOT_SGEMM_POINTERS(cublasSgemmBatched, int)
INGOT_SGEMM_POINTERS(cublasSgemmBatched_64, int64_t)
INGOT_GEMM_EX(cublasGemmEx, int)
INGOT_GEMM_EX(cublasGemmEx_64, int64_t)
INGOT_GEMM_STRIDED(cublasGemmStridedBatchedEx, int)
INGOT_GEMM_STRIDED(cublasGemmStridedBatchedEx_64, int64_t)
INGOT_GEMM_POINTERS(cublasGemmBatchedEx, int)
INGOT_GEMM_POINTERS(cublasGemmBatchedEx_64, int64_t)
