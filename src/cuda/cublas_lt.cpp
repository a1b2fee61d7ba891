#include "cuda/cublas_lt.h"

#include <algorithm>
#include <mutex>

#include "cuda/shared_library.h"
#include "support/error.h"

namespace ingot::cuda {
namespace {

// Numbers of cublasLt.h and library_types.h.
enum ComputeType : int { kCompute32f = 68, kCompute64f = 70, kComputeTf32 = 77 };
enum DataType : int { kR32f = 0, kR64f = 1, kR16f = 2, kR16bf = 14 };
enum DescriptorAttribute : int {
  kTransposeA = 3,
  kTransposeB = 4,
  kEpilogue = 7,
  kBiasPointer = 8
};
constexpr int kAddBias = 4;  // an epilogue
enum LayoutAttribute : int { kBatchCount = 5, kBatchStride = 6 };
enum PreferenceAttribute : int {
  kMaxWorkspace = 1,
  kAlignmentA = 5,
  kAlignmentB = 6,
  kAlignmentC = 7,
  kAlignmentD = 8
};
constexpr int kNoTranspose = 0, kTranspose = 1;
constexpr size_t kOldestVersion = 110000;

struct Algorithm {
  uint64_t data[8];
};
struct HeuristicResult {
  Algorithm algorithm;
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

struct Library {
  int (*create)(void**) = nullptr;
  int (*destroy)(void*) = nullptr;
  size_t (*version)() = nullptr;
  int (*descriptor_create)(void**, int, int) = nullptr;
  int (*descriptor_destroy)(void*) = nullptr;
  int (*descriptor_set)(void*, int, const void*, size_t) = nullptr;
  int (*layout_create)(void**, int, uint64_t, uint64_t, int64_t) = nullptr;
  int (*layout_destroy)(void*) = nullptr;
  int (*layout_set)(void*, int, const void*, size_t) = nullptr;
  int (*preference_create)(void**) = nullptr;
  int (*preference_destroy)(void*) = nullptr;
  int (*preference_set)(void*, int, const void*, size_t) = nullptr;
  int (*heuristic)(void*, void*, void*, void*, void*, void*, void*, int, HeuristicResult*,
                   int*) = nullptr;
  int (*matmul)(void*, void*, const void*, const void*, void*, const void*, void*, const void*,
                const void*, void*, void*, void*, const Algorithm*, void*, size_t,
                CUstream) = nullptr;
  CublasInfo info;
};

Library load_library() {
  Library l;
  const SharedLibrary library = SharedLibrary::open(
      {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"}, "INGOT_CUBLASLT");
  if (!library.is_open()) {
    l.info.why =
        "cuBLASLt not found (" + library.error() +
        "); it comes with PyTorch's CUDA wheels (nvidia-cublas) and with the CUDA toolkit; "
        "INGOT_CUBLASLT may name its file or folder";
    return l;
  }
  l.info.path = library.path();
  bool ok = library.load(l.create, "cublasLtCreate");
  ok = library.load(l.destroy, "cublasLtDestroy") && ok;
  ok = library.load(l.version, "cublasLtGetVersion") && ok;
  ok = library.load(l.descriptor_create, "cublasLtMatmulDescCreate") && ok;
  ok = library.load(l.descriptor_destroy, "cublasLtMatmulDescDestroy") && ok;
  ok = library.load(l.descriptor_set, "cublasLtMatmulDescSetAttribute") && ok;
  ok = library.load(l.layout_create, "cublasLtMatrixLayoutCreate") && ok;
  ok = library.load(l.layout_destroy, "cublasLtMatrixLayoutDestroy") && ok;
  ok = library.load(l.layout_set, "cublasLtMatrixLayoutSetAttribute") && ok;
  ok = library.load(l.preference_create, "cublasLtMatmulPreferenceCreate") && ok;
  ok = library.load(l.preference_destroy, "cublasLtMatmulPreferenceDestroy") && ok;
  ok = library.load(l.preference_set, "cublasLtMatmulPreferenceSetAttribute") && ok;
  ok = library.load(l.heuristic, "cublasLtMatmulAlgoGetHeuristic") && ok;
  ok = library.load(l.matmul, "cublasLtMatmul") && ok;
  if (l.version != nullptr) l.info.version = l.version();
  if (!ok || l.info.version < kOldestVersion) {
    l.info.why =
        fmt::format("{} is cuBLASLt {}; Ingot needs 11.0 or newer", l.info.path, l.info.version);
    return l;
  }
  l.info.available = true;
  return l;
}

const Library& library() {
  static const Library loaded = load_library();
  return loaded;
}

void check_status(int status, const char* doing) {
  if (status != 0) fail(INGOT_FAILED, "cuBLASLt: status {} while {}", status, doing);
}

int data_type(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return kR16f;
    case DType::bf16:
      return kR16bf;
    case DType::f64:
      return kR64f;
    default:
      return kR32f;
  }
}

}  // namespace

const CublasInfo& cublas_info() {
  return library().info;
}

// cuBLASLt is column-major: it computes yᵀ[n, m] = op(w) · op(x), with A = w and B = x.
struct CublasLt::Chosen {
  void *descriptor = nullptr, *a = nullptr, *b = nullptr, *d = nullptr;
  Algorithm algorithm{};
  size_t workspace = 0;
  bool wide = false;  // scalars are double
  // The address of a bias is part of the descriptor: one call at a time.
  mutable std::mutex mutex;

  ~Chosen() {
    const Library& l = library();
    if (descriptor != nullptr) l.descriptor_destroy(descriptor);
    for (void* layout : {a, b, d}) {
      if (layout != nullptr) l.layout_destroy(layout);
    }
  }
};

CublasLt::CublasLt() {
  const Library& l = library();
  if (!l.info.available) fail(INGOT_UNAVAILABLE, "{}", l.info.why);
  check_status(l.create(&handle_), "starting");
}

CublasLt::~CublasLt() {
  library().destroy(handle_);
}

namespace {

void* make_layout(DType dtype, int64_t contiguous, int64_t other, int64_t stride, int64_t batches,
                  int64_t batch_stride) {
  const Library& l = library();
  void* layout = nullptr;
  // A single column or row may come with any stride; the library wants at least the extent.
  const int64_t leading = std::max(stride, contiguous);
  check_status(l.layout_create(&layout, data_type(dtype), static_cast<uint64_t>(contiguous),
                               static_cast<uint64_t>(other), leading),
               "describing a matrix");
  if (batches > 1) {
    const int count = static_cast<int>(batches);
    check_status(l.layout_set(layout, kBatchCount, &count, sizeof(count)), "describing a batch");
    check_status(l.layout_set(layout, kBatchStride, &batch_stride, sizeof(batch_stride)),
                 "describing a batch");
  }
  return layout;
}

// To the rows of column-major yᵀ.
void set_bias(void* descriptor, const void* bias) {
  const Library& l = library();
  check_status(l.descriptor_set(descriptor, kEpilogue, &kAddBias, sizeof(kAddBias)),
               "describing a bias");
  check_status(l.descriptor_set(descriptor, kBiasPointer, &bias, sizeof(bias)),
               "describing a bias");
}

void set_preference(void* preference, int attribute, uint32_t value) {
  check_status(library().preference_set(preference, attribute, &value, sizeof(value)),
               "stating a preference");
}

}  // namespace

const CublasLt::Chosen& CublasLt::choose(const LibraryProduct& p) {
  {
    const std::shared_lock lock(mutex_);
    if (const auto found = chosen_.find(p); found != chosen_.end()) return *found->second;
  }
  const Library& l = library();
  auto chosen = std::make_unique<Chosen>();
  chosen->wide = p.operands == DType::f64;
  const int compute = chosen->wide ? kCompute64f : p.tf32 ? kComputeTf32 : kCompute32f;
  check_status(l.descriptor_create(&chosen->descriptor, compute, chosen->wide ? kR64f : kR32f),
               "describing a product");
  // Stored with k contiguous, w is (column-major) k × n and must be transposed.
  const bool w_along_k = p.w.k_stride == 1, x_along_k = p.x.k_stride == 1;
  const int transpose_a = w_along_k ? kTranspose : kNoTranspose;
  const int transpose_b = x_along_k ? kNoTranspose : kTranspose;
  check_status(l.descriptor_set(chosen->descriptor, kTransposeA, &transpose_a, sizeof(int)),
               "describing a product");
  check_status(l.descriptor_set(chosen->descriptor, kTransposeB, &transpose_b, sizeof(int)),
               "describing a product");
  // An algorithm is chosen for some address that is not null, which nothing reads.
  if (p.bias) set_bias(chosen->descriptor, &chosen->algorithm);
  chosen->a = w_along_k
                  ? make_layout(p.operands, p.k, p.n, p.w.row_stride, p.batches, p.w.batch_stride)
                  : make_layout(p.operands, p.n, p.k, p.w.k_stride, p.batches, p.w.batch_stride);
  chosen->b = x_along_k
                  ? make_layout(p.operands, p.k, p.m, p.x.row_stride, p.batches, p.x.batch_stride)
                  : make_layout(p.operands, p.m, p.k, p.x.k_stride, p.batches, p.x.batch_stride);
  chosen->d = make_layout(p.result, p.n, p.m, p.y_stride, p.batches, p.y_batch_stride);

  void* preference = nullptr;
  check_status(l.preference_create(&preference), "stating a preference");
  const uint64_t workspace = library_workspace(p.operands);
  check_status(l.preference_set(preference, kMaxWorkspace, &workspace, sizeof(workspace)),
               "stating a preference");
  set_preference(preference, kAlignmentA, static_cast<uint32_t>(p.w.alignment));
  set_preference(preference, kAlignmentB, static_cast<uint32_t>(p.x.alignment));
  set_preference(preference, kAlignmentC, static_cast<uint32_t>(p.y_alignment));
  set_preference(preference, kAlignmentD, static_cast<uint32_t>(p.y_alignment));
  HeuristicResult result{};
  int count = 0;
  const int status = l.heuristic(handle_, chosen->descriptor, chosen->a, chosen->b, chosen->d,
                                 chosen->d, preference, 1, &result, &count);
  l.preference_destroy(preference);
  if (status != 0 || count == 0) {
    fail(INGOT_UNSUPPORTED, "cuBLASLt has no algorithm for a {}×{}×{} product (status {})", p.m,
         p.n, p.k, status);
  }
  chosen->algorithm = result.algorithm;
  chosen->workspace = result.workspace;
  const std::unique_lock lock(mutex_);
  return *chosen_.emplace(p, std::move(chosen)).first->second;
}

void CublasLt::prepare(const LibraryProduct& product) {
  choose(product);
}

size_t CublasLt::workspace(const LibraryProduct& product) {
  return choose(product).workspace;
}

void CublasLt::run(const LibraryProduct& product, const Memory& memory, CUstream stream) {
  const Chosen& chosen = choose(product);
  const float one = 1, zero = 0;
  const double wide_one = 1, wide_zero = 0;
  const void* alpha = chosen.wide ? static_cast<const void*>(&wide_one) : &one;
  const void* beta = chosen.wide ? static_cast<const void*>(&wide_zero) : &zero;
  std::unique_lock<std::mutex> lock;
  if (product.bias) {
    lock = std::unique_lock(chosen.mutex);
    set_bias(chosen.descriptor, memory.bias);
  }
  check_status(
      library().matmul(handle_, chosen.descriptor, alpha, memory.w, chosen.a, memory.x, chosen.b,
                       beta, memory.y, chosen.d, memory.y, chosen.d, &chosen.algorithm,
                       chosen.workspace > 0 ? memory.workspace : nullptr, chosen.workspace, stream),
      "launching a product");
}

}  // namespace ingot::cuda
