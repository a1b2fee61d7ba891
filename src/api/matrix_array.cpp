// Matrices that are given by an array of their addresses: ingot.h.
#include "product/matrix_array.cuh"

#include <climits>

#include "api/guard.h"
#include "cuda/matrix_array.h"

namespace ingot::abi {
namespace {

MatrixArray checked(const ingot_matrix_array* given) {
  require(given != nullptr && given->matrices != nullptr && given->dense != nullptr,
          "an address is NULL");
  require(given->count > 0 && given->lines > 0 && given->length > 0, "an extent is not positive");
  require(given->lines <= INT_MAX && given->length <= INT_MAX, "an extent exceeds 2^31");
  require(given->leading >= given->length && given->dense_leading >= given->length,
          "lines overlap");
  const MatrixArray made = {given->matrices,
                            given->leading,
                            given->dense,
                            given->dense_leading,
                            given->count,
                            static_cast<i32>(given->lines),
                            static_cast<i32>(given->length)};
  require(given->count <= INT_MAX / given->lines && matrix_array_blocks(made) <= INT_MAX,
          "there are too many lines");
  return made;
}

// On the host: act(an element of a matrix, the same where all lie behind one another).
template <class Act>
void for_each_element(const MatrixArray& a, Act act) {
  for (i64 line = 0; line < a.count * a.lines; ++line) {
    float* const apart = a.matrices[line / a.lines] + line % a.lines * a.leading;
    float* const dense = a.dense + line * a.dense_leading;
    for (i32 i = 0; i < a.length; ++i) act(apart[i], dense[i]);
  }
}

}  // namespace
}  // namespace ingot::abi

using namespace ingot;

ingot_status ingot_matrix_array_prepare(int device) {
  return abi::guarded([&] {
    if (device >= 0) cuda::prepare_matrix_arrays(device);
  });
}

ingot_status ingot_matrix_array_gather(const ingot_matrix_array* matrices, int device,
                                       void* stream) {
  return abi::guarded([&] {
    const MatrixArray array = abi::checked(matrices);
    if (device >= 0)
      return cuda::gather_matrices(device, array, static_cast<cuda::CUstream>(stream));
    abi::for_each_element(array, [](float apart, float& dense) { dense = apart; });
  });
}

ingot_status ingot_matrix_array_scatter(const ingot_matrix_array* matrices, float alpha, float beta,
                                        const float* alpha_at, const float* beta_at, int device,
                                        void* stream) {
  return abi::guarded([&] {
    const MatrixArray array = abi::checked(matrices);
    const MatrixScale scale = {alpha, beta, alpha_at, beta_at};
    if (device >= 0) {
      return cuda::scatter_products(device, array, scale, static_cast<cuda::CUstream>(stream));
    }
    const float a = alpha_at == nullptr ? alpha : *alpha_at;
    const float b = beta_at == nullptr ? beta : *beta_at;
    abi::for_each_element(
        array, [&](float& apart, float dense) { apart = scaled_sum(a, dense, b, apart); });
  });
}
