#include "cpu/product/measured.h"

#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "support/private_files.h"
#include "support/threads.h"

namespace ingot::cpu {
namespace {

constexpr int kRounds = 9;
constexpr int64_t kColumns = 1024, kDepth = 1024;
constexpr int64_t kFewestRows = 128, kMostRows = 16384;
// A second shape has so many times the rows of the smallest that would be taken.
constexpr int64_t kLarger = 4;
constexpr uint64_t kMostBytes = 4096;

ProductCall trial_call(int64_t rows) {
  ProductCall call;
  call.m = rows, call.n = kColumns, call.k = kDepth;
  call.lda = kDepth, call.ldb = kDepth, call.ldc = kColumns;
  call.transpose_b = true;
  return call;
}

// Values in [-1, 1): what they are does not change how long a product takes.
std::vector<float> some_values(int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  uint32_t state = 12345;
  for (float& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
  }
  return values;
}

double seconds_of(const ProductProvider& product, const ProductCall& call) {
  const auto begin = std::chrono::steady_clock::now();
  product.run(call);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

nlohmann::json verdict_json(const std::string& key, const Verdict& verdict) {
  return {{"ingot_measured_product", 1},
          {"of", key},
          {"median", verdict.median},
          {"quartile", verdict.quartile}};
}

std::optional<Verdict> read_verdict(const Descriptor& folder, const std::string& name,
                                    const std::string& key) {
  std::string why;
  const std::optional<std::string> text = read_private_file(folder, name, kMostBytes, &why);
  if (!text) return std::nullopt;
  const nlohmann::json found = nlohmann::json::parse(*text, nullptr, false);
  if (!found.is_object() || found.value("of", nlohmann::json()) != key) return std::nullopt;
  const nlohmann::json median = found.value("median", nlohmann::json()),
                       quartile = found.value("quartile", nlohmann::json());
  if (!median.is_number() || !quartile.is_number()) return std::nullopt;
  return Verdict{median.get<double>(), quartile.get<double>()};
}

// Whole or not at all, and never in the place of another's.
bool keep_verdict(const Descriptor& folder, const std::string& name, const std::string& text) {
  std::string temporary;
  Descriptor file = create_private_file(folder, &temporary);
  if (!file) return false;
  bool ok = write_all(file, text.data(), text.size());
  ok = file.close() && ok;
  ok = ok && ::linkat(folder.get(), temporary.c_str(), folder.get(), name.c_str(), 0) == 0;
  ::unlinkat(folder.get(), temporary.c_str(), 0);
  return ok;
}

}  // namespace

Verdict judge(std::vector<std::vector<double>> ratios) {
  Verdict worst;
  for (std::vector<double>& shape : ratios) {
    if (shape.empty()) return {};
    std::sort(shape.begin(), shape.end());
    const Verdict own{shape[shape.size() / 2], shape[shape.size() / 4]};
    const bool first = &shape == &ratios.front();
    worst.median = first ? own.median : std::min(worst.median, own.median);
    worst.quartile = first ? own.quartile : std::min(worst.quartile, own.quartile);
  }
  return worst;
}

MeasuredProduct::MeasuredProduct(std::shared_ptr<const ProductProvider> challenger,
                                 std::shared_ptr<const ProductProvider> champion,
                                 std::string folder, std::string processor)
    : challenger_(std::move(challenger)),
      champion_(std::move(champion)),
      folder_(std::move(folder)),
      processor_(std::move(processor)) {}

std::string MeasuredProduct::key() const {
  return fmt::format("{}, {} threads: {} against {}, Ingot {}", processor_, thread_count(),
                     challenger_->name(), champion_->name(), INGOT_VERSION);
}

bool MeasuredProduct::takes(const ProductCall& call) const {
  if (!challenger_->takes(call)) return false;
  const std::optional<Verdict> found = verdict();
  return found && found->is_faster();
}

std::optional<Verdict> MeasuredProduct::verdict() const {
  if (folder_.empty()) return std::nullopt;
  static std::mutex mutex;
  static std::map<std::string, std::optional<Verdict>> known;
  const std::string key = this->key();
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(folder_ + key); found != known.end()) return found->second;
  std::optional<Verdict>& answer = known[folder_ + key];
  make_private_folder(folder_);
  std::string why;
  const Descriptor folder = open_private_folder(folder_, &why);
  if (!folder) return answer;
  const std::string name = fmt::format("product-{:016x}.json", XXH3_64bits(key.data(), key.size()));
  answer = read_verdict(folder, name, key);
  if (answer) return answer;
  const std::string text = verdict_json(key, measure()).dump() + "\n";
  if (!keep_verdict(folder, name, text)) {
    // Another process was first, or a damaged file is in the way.
    answer = read_verdict(folder, name, key);
    if (answer) return answer;
    ::unlinkat(folder.get(), name.c_str(), 0);
    if (!keep_verdict(folder, name, text)) return answer;
  }
  return answer = read_verdict(folder, name, key);
}

Verdict MeasuredProduct::measure() const {
  int64_t rows = kFewestRows;
  while (rows < kMostRows && !challenger_->takes(trial_call(rows))) rows *= 2;
  const int64_t most = std::min(rows * kLarger, kMostRows);
  const std::vector<float> a = some_values(most * kDepth), b = some_values(kColumns * kDepth);
  std::vector<float> c(static_cast<size_t>(most * kColumns));
  std::vector<std::vector<double>> ratios;
  for (const int64_t m : {rows, most}) {
    ProductCall call = trial_call(m);
    call.a = a.data(), call.b = b.data(), call.c = c.data();
    if (!challenger_->takes(call) || !champion_->takes(call)) return {};
    std::vector<double>& shape = ratios.emplace_back();
    for (int round = -1; round < kRounds; ++round) {  // the first warms up
      const double own = seconds_of(*challenger_, call), other = seconds_of(*champion_, call);
      if (round >= 0) shape.push_back(other / std::max(own, 1e-9));
    }
  }
  return judge(std::move(ratios));
}

std::string MeasuredProduct::describe() const {
  const std::optional<Verdict> found = verdict();
  if (!found) return "no: there is no cache folder to keep a measurement in";
  return fmt::format("{}: measured here, {:.2f} times as fast as {} (lower quartile {:.2f})",
                     found->is_faster() ? "yes, where it pays" : "no", found->median,
                     champion_->name(), found->quartile);
}

}  // namespace ingot::cpu
