#include "blas/pointer_batch.h"

#include <map>
#include <mutex>

namespace ingot::blas {
namespace {

constexpr size_t kAlignment = 256;

// Of an operand stored rows × columns or, if `transposed`, columns × rows. Lines of dense memory
// begin on 16 bytes, as the copy engine wants them.
ingot_matrix_array array_of(const float* const* matrices, int64_t leading, int64_t count,
                            int64_t rows, int64_t columns, bool transposed) {
  const int64_t lines = transposed ? rows : columns, length = transposed ? columns : rows;
  const int64_t dense_leading = (length + 3) / 4 * 4;
  return {
      const_cast<float* const*>(matrices), leading, nullptr, dense_leading, count, lines, length};
}

int64_t stride_of(const ingot_matrix_array& a) {
  return a.lines * a.dense_leading;
}

size_t bytes_of(const ingot_matrix_array& a) {
  const size_t bytes = static_cast<size_t>(a.count * stride_of(a)) * sizeof(float);
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

ingot_matrix_array placed(ingot_matrix_array array, void* memory, size_t offset) {
  array.dense = reinterpret_cast<float*>(static_cast<char*>(memory) + offset);
  return array;
}

}  // namespace

PointerBatch::PointerBatch(const Product& p, const Pointers& pointers)
    : given_(p),
      a_(array_of(pointers.a, p.lda, p.batches, p.m, p.k, p.operation_a != kNone)),
      b_(array_of(pointers.b, p.ldb, p.batches, p.k, p.n, p.operation_b != kNone)),
      c_(array_of(pointers.c, p.ldc, p.batches, p.m, p.n, false)),
      b_offset_(bytes_of(a_)),
      c_offset_(b_offset_ + bytes_of(b_)),
      bytes_(c_offset_ + bytes_of(c_)) {}

Product PointerBatch::product(void* memory) const {
  Product p = given_;
  p.a = placed(a_, memory, 0).dense;
  p.b = placed(b_, memory, b_offset_).dense;
  p.c = placed(c_, memory, c_offset_).dense;
  p.lda = a_.dense_leading;
  p.ldb = b_.dense_leading;
  p.ldc = c_.dense_leading;
  p.stride_a = stride_of(a_);
  p.stride_b = stride_of(b_);
  p.stride_c = stride_of(c_);
  return p;
}

Outcome PointerBatch::prepare(int device, bool capturing) {
  struct Prepared {
    std::mutex mutex;
    std::map<int, Outcome> devices;
  };
  static Prepared& prepared = *new Prepared;
  const std::lock_guard lock(prepared.mutex);
  if (const auto found = prepared.devices.find(device); found != prepared.devices.end()) {
    return found->second;
  }
  if (capturing) return Outcome::capturing;
  const AllowDuringCapture allow;
  const bool ready = ingot().prepare_arrays(device) == INGOT_OK;
  if (!ready) say(std::string("batches by pointers are left to cuBLAS: ") + ingot().last_error());
  return prepared.devices[device] = ready ? Outcome::taken_fp32 : Outcome::failed;
}

bool PointerBatch::gather(void* memory, int device, Stream stream) const {
  const ingot_matrix_array a = placed(a_, memory, 0), b = placed(b_, memory, b_offset_);
  return ingot().gather(&a, device, stream) == INGOT_OK &&
         ingot().gather(&b, device, stream) == INGOT_OK;
}

bool PointerBatch::scatter(void* memory, const Request& request, int device) const {
  const ingot_matrix_array c = placed(c_, memory, c_offset_);
  return ingot().scatter(&c, request.scalars.alpha, request.scalars.beta, request.alpha,
                         request.beta, device, request.stream) == INGOT_OK;
}

}  // namespace ingot::blas
