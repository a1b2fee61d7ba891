// cublasLtMatmul: fp32 products with a bias, ReLU and GELU.
#include <optional>

#include "blas/hook.h"

namespace ingot::blas {
namespace {

// Numbers of cublasLt.h.
enum DescriptorAttribute : int {
  kComputeTypeOf = 0,
  kScaleType = 1,
  kPointerMode = 2,
  kTransposeA = 3,
  kTransposeB = 4,
  kTransposeC = 5,
  kEpilogue = 7,
  kBiasPointer = 8,
  kBiasBatchStride = 10,
  kBiasType = 26
};
enum LayoutAttribute : int {
  kType = 0,
  kOrder = 1,
  kRows = 2,
  kColumns = 3,
  kLeading = 4,
  kBatchCount = 5,
  kBatchStride = 6
};
enum EpilogueKind : uint32_t {
  kPlain = 1,
  kRelu = 2,
  kBias = 4,
  kReluBias = 6,
  kGelu = 32,
  kGeluBias = 36
};
constexpr int kColumnMajor = 0, kRowMajor = 1;

using Get = Status(void*, int, void*, size_t, size_t*);
constinit Real<Get> get_descriptor("cublasLtMatmulDescGetAttribute");
constinit Real<Get> get_layout("cublasLtMatrixLayoutGetAttribute");

template <class T>
std::optional<T> attribute(Real<Get>& get, void* of, int which) {
  T value{};
  size_t written = 0;
  if (of == nullptr ||
      hand_on(get, of, which, static_cast<void*>(&value), sizeof(T), &written) != kSuccess) {
    return std::nullopt;
  }
  return value;
}

struct LtCall {
  void* descriptor;
  const void* alpha;
  const void* a;
  void* a_layout;
  const void* b;
  void* b_layout;
  const void* beta;
  const void* c;
  void* c_layout;
  void* d;
  void* d_layout;
  Stream stream;
};

// As a column-major matrix: of a row-major one, its transpose.
struct Layout {
  uint64_t rows = 0, columns = 0;
  int64_t leading = 0, batch_stride = 0;
  int32_t batches = 1;
  bool transposed = false;
};

// nullopt for what is neither column-major nor row-major.
std::optional<Layout> layout_of(void* of) {
  const auto order = attribute<int32_t>(get_layout, of, kOrder);
  const auto rows = attribute<uint64_t>(get_layout, of, kRows);
  const auto columns = attribute<uint64_t>(get_layout, of, kColumns);
  const auto leading = attribute<int64_t>(get_layout, of, kLeading);
  const auto batches = attribute<int32_t>(get_layout, of, kBatchCount);
  const auto stride = attribute<int64_t>(get_layout, of, kBatchStride);
  if (!order || !rows || !columns || !leading || !batches || !stride) return std::nullopt;
  if (*order == kColumnMajor) return Layout{*rows, *columns, *leading, *stride, *batches, false};
  if (*order == kRowMajor) return Layout{*columns, *rows, *leading, *stride, *batches, true};
  return std::nullopt;
}

int flipped(int operation, bool flip) {
  if (!flip) return operation;
  if (operation == kNone) return kTranspose;
  const bool known = operation == kTranspose || operation == kConjugate;  // the same of reals
  return known ? kNone : operation;
}

// An operand of op(A) · op(B) in memory.
struct Factor {
  int operation;
  Layout layout;
  const float* data;

  uint64_t rows() const { return operation == kNone ? layout.rows : layout.columns; }
  uint64_t columns() const { return operation == kNone ? layout.columns : layout.rows; }
  // Of the transposed product.
  Factor transposed() const { return {flipped(operation, true), layout, data}; }
};

bool is_fp32(void* layout) {
  return attribute<int32_t>(get_layout, layout, kType) == kR32f;
}

struct LtProduct {
  Product product;
  bool by_rows;  // D is row-major: a row of it is a column of the product's C
};

// Without its epilogue; nullopt where it is none that BLAS knows.
std::optional<LtProduct> product_of(const LtCall& call, bool device_scalars) {
  const auto a = layout_of(call.a_layout), b = layout_of(call.b_layout),
             c = layout_of(call.c_layout), d = layout_of(call.d_layout);
  const auto ta = attribute<int32_t>(get_descriptor, call.descriptor, kTransposeA);
  const auto tb = attribute<int32_t>(get_descriptor, call.descriptor, kTransposeB);
  const auto tc = attribute<int32_t>(get_descriptor, call.descriptor, kTransposeC);
  if (!a || !b || !c || !d || !ta || !tb || tc != kNone) return std::nullopt;
  Factor first = {flipped(*ta, a->transposed), *a, static_cast<const float*>(call.a)};
  Factor second = {flipped(*tb, b->transposed), *b, static_cast<const float*>(call.b)};
  if (d->transposed) {
    const Factor whole = first;
    first = second.transposed();
    second = whole.transposed();
  }
  const bool fits =
      first.rows() == d->rows && second.columns() == d->columns && second.rows() == first.columns();
  const bool adds =
      device_scalars || (call.beta != nullptr && *static_cast<const float*>(call.beta) != 0);
  const bool same_matrix = c->rows == d->rows && c->columns == d->columns &&
                           c->transposed == d->transposed && c->batches == d->batches;
  const bool in_place =
      call.c == call.d && c->leading == d->leading && c->batch_stride == d->batch_stride;
  const bool apart = call.c != call.d && call.c != nullptr;
  const bool added_fits = same_matrix && (in_place || apart);
  if (!fits || (adds && !added_fits) || a->batches != d->batches || b->batches != d->batches) {
    return std::nullopt;
  }
  Product product = {first.operation,
                     second.operation,
                     static_cast<int64_t>(d->rows),
                     static_cast<int64_t>(d->columns),
                     static_cast<int64_t>(first.columns()),
                     first.data,
                     first.layout.leading,
                     first.layout.batch_stride,
                     second.data,
                     second.layout.leading,
                     second.layout.batch_stride,
                     static_cast<float*>(call.d),
                     d->leading,
                     d->batch_stride,
                     d->batches};
  if (adds && apart) {
    product.added = {static_cast<const float*>(call.c), c->leading, c->batch_stride};
  }
  return LtProduct{product, d->transposed};
}

std::optional<Epilogue> epilogue_of(const LtCall& call) {
  const auto kind = attribute<uint32_t>(get_descriptor, call.descriptor, kEpilogue);
  if (!kind) return std::nullopt;
  Epilogue epilogue;
  if (*kind == kRelu || *kind == kReluBias) epilogue.activation = Activation::relu;
  if (*kind == kGelu || *kind == kGeluBias) epilogue.activation = Activation::gelu;
  if (*kind == kPlain || *kind == kRelu || *kind == kGelu) return epilogue;
  if (*kind != kBias && *kind != kReluBias && *kind != kGeluBias) return std::nullopt;
  const auto bias = attribute<void*>(get_descriptor, call.descriptor, kBiasPointer);
  const auto type = attribute<int32_t>(get_descriptor, call.descriptor, kBiasType);
  // Not set, it is the type of D.
  if (!bias || *bias == nullptr || (type && *type != kR32f && *type != -1)) return std::nullopt;
  epilogue.bias = static_cast<const float*>(*bias);
  epilogue.bias_stride = attribute<int64_t>(get_descriptor, call.descriptor, kBiasBatchStride)
                             .value_or(0);  // cublasLt 11 has none
  return epilogue;
}

Answer decide(const LtCall& call, Product& product) {
  const auto compute = attribute<int32_t>(get_descriptor, call.descriptor, kComputeTypeOf);
  const auto scale = attribute<int32_t>(get_descriptor, call.descriptor, kScaleType);
  const auto mode = attribute<int32_t>(get_descriptor, call.descriptor, kPointerMode);
  if (!compute || scale != kR32f || !mode || call.alpha == nullptr) return {Outcome::unusual, 0};
  const bool device_scalars = *mode == kDevice && call.beta != nullptr;
  if (*mode != kHost && !device_scalars) return {Outcome::epilogue, 0};  // a vector of them
  const std::optional<LtProduct> found = product_of(call, device_scalars);
  const std::optional<Epilogue> epilogue = epilogue_of(call);
  if (found) product = found->product;
  if (!found || !epilogue) return {Outcome::epilogue, 0};
  if (!is_sound(product)) return {Outcome::unusual, 0};
  // One for each row of D.
  const bool biased = epilogue->bias != nullptr;
  if (biased && found->by_rows) return {Outcome::epilogue, 0};
  Request request;
  request.product = product;
  if (!biased || epilogue->bias_stride == 0) merge_batches(request.product);
  if (const auto no = refuses(request.product)) return {*no, 0};
  request.epilogue = *epilogue;
  request.whole = true;  // the rest of a batch cannot be handed on: the layouts count its products
  request.precision = precision_of(*compute, kDefaultMath, settings());
  if (!is_taken(request.precision)) return {request.precision, 0};
  const auto* alpha = static_cast<const float*>(call.alpha);
  const auto* beta = static_cast<const float*>(call.beta);
  if (device_scalars) {
    request.alpha = alpha;
    request.beta = beta;
  } else {
    request.scalars = {*alpha, beta == nullptr ? 0 : *beta};
  }
  request.stream = call.stream;
  return run(request);
}

bool take(const char* function, const LtCall& call) {
  if (!is_fp32(call.a_layout) || !is_fp32(call.b_layout) || !is_fp32(call.d_layout)) {
    count_other();
    return false;
  }
  Product product;
  const Answer answer = decide(call, product);
  count(function, product, answer.outcome);
  return is_taken(answer.outcome);
}

using Matmul = Status(void*, void*, const void*, const void*, void*, const void*, void*,
                      const void*, const void*, void*, void*, void*, const void*, void*, size_t,
                      Stream);
constinit Real<Matmul> real_matmul("cublasLtMatmul");

}  // namespace
}  // namespace ingot::blas

extern "C" [[gnu::visibility("default")]] ingot::blas::Status cublasLtMatmul(
    void* handle, void* descriptor, const void* alpha, const void* a, void* a_layout, const void* b,
    void* b_layout, const void* beta, const void* c, void* c_layout, void* d, void* d_layout,
    const void* algorithm, void* workspace, size_t workspace_bytes, ingot::blas::Stream stream) {
  using namespace ingot::blas;
  if (!passes_through() && take(real_matmul.name(), {descriptor, alpha, a, a_layout, b, b_layout,
                                                     beta, c, c_layout, d, d_layout, stream})) {
    return kSuccess;
  }
  const BelowHook below;
  return hand_on(real_matmul, handle, descriptor, alpha, a, a_layout, b, b_layout, beta, c,
                 c_layout, d, d_layout, algorithm, workspace, workspace_bytes, stream);
}
