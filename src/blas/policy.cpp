#include "blas/policy.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace ingot::blas {
namespace {

// Below these a product is bound by launches, where the library is at least as fast, or a product
// with a vector. On an H200: 8×4096→4096 1.8 × the library's speed, 1×4096→4096 0.85.
constexpr int64_t kLeastExtent = 8, kLeastDepth = 32;
constexpr int64_t kLeastWork = int64_t{128} * 128 * 128;
// Of a batch that one launch multiplies; the least work is the whole batch's. 4096 of 64³ 1.2 ×,
// 8192 of 32³ 0.8.
constexpr int64_t kLeastExtentOfEntry = 48;
// Of a batch whose products run one after another, each must fill the GPU.
constexpr int64_t kLeastWorkOfEntry = int64_t{1024} * 1024 * 1024;
constexpr int64_t kMostEntries = 64;

std::atomic<bool> switched_on{true};

bool is_off(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && std::strcmp(value, "off") == 0;
}

}  // namespace

const char* name_of(Outcome outcome) {
  switch (outcome) {
    case Outcome::taken_fp32:
      return "taken (fp32)";
    case Outcome::taken_tf32:
      return "taken (tf32)";
    case Outcome::not_fp32:
      return "operands are not fp32";
    case Outcome::unusual:
      return "empty, or arguments that the library must judge";
    case Outcome::small:
      return "too small or too thin to gain";
    case Outcome::small_batch:
      return "a batch of small products";
    case Outcome::pointer_batch:
      return "a batch by pointers, whose copies would take what is gained";
    case Outcome::epilogue:
      return "an epilogue or layout of cublasLt";
    case Outcome::math_mode:
      return "the math mode or compute type asks for the library";
    case Outcome::zero_alpha:
      return "alpha is zero";
    case Outcome::scalars:
      return "alpha or beta is not finite";
    case Outcome::capturing:
      return "the stream is being captured";
    case Outcome::device:
      return "the GPU, or the context of the stream";
    case Outcome::library_faster:
      return "the library is estimated to be faster, or must do it";
    case Outcome::shapes:
      return "too many different shapes";
    case Outcome::memory:
      return "no memory for its workspace";
    case Outcome::unavailable:
      return "libingot.so could not be used";
    case Outcome::failed:
      return "Ingot failed";
  }
  return "";
}

Settings Settings::read() {
  const char* override_tf32 = std::getenv("NVIDIA_TF32_OVERRIDE");
  const bool no_tf32 = override_tf32 != nullptr && std::strcmp(override_tf32, "0") == 0;
  return {!is_off("INGOT") && !is_off("INGOT_BLAS"), !no_tf32, !is_off("INGOT_BLAS_CAPTURE")};
}

const Settings& settings() {
  static const Settings read = Settings::read();
  return read;
}

bool is_on() {
  return switched_on.load(std::memory_order_relaxed) && settings().on;
}

void switch_to(bool on) {
  switched_on.store(on, std::memory_order_relaxed);
}

namespace {

// Multiplications, or as many as fit.
int64_t work_of(const Product& p) {
  const int64_t of_column = p.m * p.k;  // both are ints
  const int64_t columns = p.n * p.batches;
  return columns > INT64_MAX / of_column ? INT64_MAX : of_column * columns;
}

}  // namespace

std::optional<Outcome> refuses(const Product& p) {
  const bool batch = p.batches > 1;
  const int64_t least = batch ? kLeastExtentOfEntry : kLeastExtent;
  if (p.m < least || p.n < least || p.k < kLeastDepth || work_of(p) < kLeastWork) {
    return batch ? Outcome::small_batch : Outcome::small;
  }
  return std::nullopt;
}

// Microseconds on an H200: fp32 products at 200 TF/s in the place of 50, and what moves matrices
// into dense memory and out of it, which is packed from there (4.5 TB/s were measured, of which L2
// has a part).
bool pays_by_pointers(const Product& p, Outcome precision) {
  constexpr double kGained = 2 * (1 / 50e6 - 1 / 200e6), kByte = 1 / 4.0e6, kLaunches = 10;
  constexpr double kMargin = 1.2, kMostBytes = 0x1p37;
  const double m = double(p.m), n = double(p.n), k = double(p.k), batches = double(p.batches);
  const double operands = 4 * batches * (m * k + k * n), results = 4 * batches * m * n;
  if (precision != Outcome::taken_fp32 || operands + results > kMostBytes) return false;
  // Read and written twice; written, read, and added to what is there.
  const double copies = kByte * (4 * operands + 3 * results) + kLaunches;
  return kGained * batches * m * n * k > kMargin * copies;
}

bool may_run_one_by_one(const Product& batch) {
  const Product entry = entry_of(batch, 0);
  return !refuses(entry) && work_of(entry) >= kLeastWorkOfEntry && batch.batches <= kMostEntries;
}

Outcome precision_of(int compute_type, int math_mode, const Settings& settings) {
  const Outcome tf32 = settings.tf32 ? Outcome::taken_tf32 : Outcome::taken_fp32;
  if (compute_type == kComputeFastTf32) return tf32;
  if (compute_type != kCompute32f) return Outcome::math_mode;
  switch (math_mode & kMathModes) {
    case kDefaultMath:
      return Outcome::taken_fp32;
    case kTf32Math:
      return tf32;
    default:
      return Outcome::math_mode;
  }
}

}  // namespace ingot::blas
