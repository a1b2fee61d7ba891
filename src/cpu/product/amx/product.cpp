#include "cpu/product/amx/product.h"

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <new>
#include <optional>

#include "cpu/product/amx/nonfinite.h"
#include "cpu/product/amx/support.h"
#include "support/error.h"
#include "support/threads.h"

namespace ingot::cpu::amx {
namespace {

// Larger strips are given back after a call.
constexpr size_t kKeptBytes = size_t{64} << 20;

PanelStore& strip_memory() {
  static thread_local PanelStore store;
  return store;
}

std::vector<int64_t> marked(const std::vector<unsigned char>& flags) {
  std::vector<int64_t> found;
  for (size_t i = 0; i < flags.size(); ++i) {
    if (flags[i] != 0) found.push_back(static_cast<int64_t>(i));
  }
  return found;
}

class Run {
 public:
  Run(const Problem& problem, int64_t threads)
      : problem_(problem),
        blocking_(choose_blocking(problem.left.panels(), problem.right.panels(),
                                  problem.left.blocks(), threads, problem.packed_right != nullptr)),
        left_nonfinite_(static_cast<size_t>(problem.left.rows)),
        right_nonfinite_(static_cast<size_t>(problem.right.rows)) {}

  void run_strip(int64_t index) {
    const int64_t begin = index * blocking_.strip;
    const Range strip{begin, std::min(problem_.left.panels(), begin + blocking_.strip)};
    if (strip.size() <= 0) return;
    PanelStore& store = strip_memory();
    pack_left(strip, &store);
    parallel_for(
        blocking_.over_m * blocking_.over_n,
        [&](int64_t task, int) {
          Rectangle rectangle(problem_, store, strip, right_nonfinite_.data());
          rectangle.run(
              part_of(strip, blocking_.over_m, task % blocking_.over_m),
              part_of({0, problem_.right.panels()}, blocking_.over_n, task / blocking_.over_m));
          const std::lock_guard lock(mutex_);
          for (int i = 0; i < 2; ++i) counts.pairs[i] += rectangle.counts().pairs[i];
        },
        threads());
  }

  int64_t strips() const { return blocking_.strips; }
  std::vector<int64_t> nonfinite_rows() const { return marked(left_nonfinite_); }
  std::vector<int64_t> nonfinite_columns() const {
    return problem_.packed_right != nullptr ? problem_.packed_right->nonfinite_rows()
                                            : marked(right_nonfinite_);
  }

  Counts counts;

 private:
  int threads() const { return static_cast<int>(blocking_.over_m * blocking_.over_n); }

  void pack_left(Range strip, PanelStore* store) {
    const int64_t blocks = problem_.left.blocks(), height = strip.size();
    store->reserve(height * blocks);
    // A panel's blocks follow one another in memory: they go to one thread, but where there are
    // fewer panels than threads.
    const int64_t pieces = std::min(blocks, ceil_div(threads() * 2, height));
    parallel_for(
        height * pieces,
        [&](int64_t task, int) {
          const int64_t i = task / pieces;
          const Range some = part_of({0, blocks}, pieces, task % pieces);
          for (int64_t block = some.begin; block < some.end; ++block) {
            const int64_t panel = strip.begin + i;
            const PanelReport report =
                store->pack(problem_.engine, problem_.scheme, problem_.left.source(panel, block),
                            block * height + i);
            for (int row = 0; row < kPanelRows; ++row) {
              if ((report.nonfinite >> row & 1u) == 0) continue;
              std::atomic_ref(left_nonfinite_[static_cast<size_t>(panel * kPanelRows + row)])
                  .store(1, std::memory_order_relaxed);
            }
          }
        },
        threads());
  }

  const Problem& problem_;
  Blocking blocking_;
  std::vector<unsigned char> left_nonfinite_, right_nonfinite_;
  std::mutex mutex_;
};

}  // namespace

Product::Product(std::string name, const Engine& engine, Scheme scheme, const Isa& isa,
                 bool takes_all)
    : name_(std::move(name)), engine_(engine), scheme_(scheme), isa_(isa), takes_all_(takes_all) {}

// Where it was faster than MKL, or where what was measured gives no reason to doubt it
// (docs/cpu-backend.md). Short left operands do not pay for packing the right one; many threads
// want more work, since packing the left one is a loop of its own.
bool Product::takes(const ProductCall& call) const {
  if (call.dtype != INGOT_F32) return false;
  if (takes_all_) return true;
  // Whether b is packed already does not count: results must not depend on it.
  const bool f3 = scheme_ == Scheme::f3;
  const int64_t least_rows = f3 ? 64 : 96;
  const int threads = thread_count();
  const double least_products =
      threads > 2 ? (f3 ? 6e7 : 1.2e8) * (threads - 1) : (f3 ? 1.6e7 : 1.2e8);
  const double products =
      static_cast<double>(call.m) * static_cast<double>(call.n) * static_cast<double>(call.k);
  return call.m >= least_rows && call.n >= 64 && call.k >= 64 && products >= least_products;
}

bool Product::run_counted(const ProductCall& call, Counts* counts) const {
  if (call.dtype != INGOT_F32) return false;
  if (call.m <= 0 || call.n <= 0) return true;
  auto* const c = static_cast<float*>(call.c);
  if (call.k <= 0) {
    for (int64_t i = 0; i < call.m; ++i) std::fill_n(c + i * call.ldc, call.n, 0.0f);
    return true;
  }
  Problem problem{engine_, scheme_, left_of(call), right_of(call), nullptr, c, call.ldc};
  std::optional<PackedRight> packed;
  if (const std::byte* memory = packed_by(call, header(call))) {
    problem.packed_right = &packed.emplace(problem.right, memory);
  }
  Run run(problem, thread_count());
  for (int64_t strip = 0; strip < run.strips(); ++strip) run.run_strip(strip);
  strip_memory().release_above(kKeptBytes);
  const std::vector<int64_t> rows = run.nonfinite_rows(), columns = run.nonfinite_columns();
  run.counts.rows = static_cast<int64_t>(rows.size());
  run.counts.columns = static_cast<int64_t>(columns.size());
  if (counts != nullptr) *counts = run.counts;
  return recompute(isa_, call, rows, columns);
}

PackedHeader Product::header(const ProductCall& call) const {
  return header_of(call, &engine_, static_cast<int64_t>(scheme_));
}

size_t Product::packed_bytes(const ProductCall& call) const {
  if (call.dtype != INGOT_F32 || call.n <= 0 || call.k <= 0) return 0;
  return sizeof(PackedHeader) + PackedRight::bytes(right_of(call));
}

void Product::pack(const ProductCall& call, std::byte* memory) const {
  new (memory) PackedHeader(header(call));
  PackedRight::pack(engine_, scheme_, right_of(call), memory + sizeof(PackedHeader));
}

Choice parse_choice(const std::string& text) {
  if (text.empty() || text == "auto") return Choice::automatic;
  if (text == "no-amx") return Choice::none;
  if (text == "amx-fp16") return Choice::fp16;
  if (text == "amx-bf16") return Choice::bf16;
  if (text == "amx-fp16-emulated") return Choice::fp16_emulated;
  if (text == "amx-bf16-emulated") return Choice::bf16_emulated;
  fail(INGOT_INVALID_ARGUMENT,
       "INGOT_CPU_PRODUCT is '{}'; it may be auto, no-amx, amx-fp16, amx-bf16, or for tests "
       "amx-fp16-emulated, amx-bf16-emulated",
       text);
}

Choice choice_of_environment() {
  static const std::string text = [] {
    const char* set = std::getenv("INGOT_CPU_PRODUCT");
    return std::string(set != nullptr ? set : "");
  }();
  return parse_choice(text);
}

std::string use_of(const Support& usable, Choice choice) {
  switch (choice) {
    case Choice::none:
      return "off (INGOT_CPU_PRODUCT=no-amx)";
    case Choice::automatic:
      return usable.bf16 ? "where a measurement finds it faster" : "no";
    case Choice::fp16_emulated:
    case Choice::bf16_emulated:
      return "emulated, for tests";
    default:
      return "yes, where it pays (INGOT_CPU_PRODUCT)";
  }
}

std::shared_ptr<const ProductProvider> amx_product(const Isa& isa, Choice choice) {
  if (choice == Choice::none) return nullptr;
  const bool emulated = choice == Choice::fp16_emulated || choice == Choice::bf16_emulated;
  if (emulated) {
    const bool fp16 = choice == Choice::fp16_emulated;
    return std::make_shared<Product>(
        fp16 ? "ingot AMX product (fp16, emulated)" : "ingot AMX product (bf16, emulated)",
        best_emulated_engine(isa), fp16 ? Scheme::f3 : Scheme::b6, isa, true);
  }
  const Support usable = support(isa);
  const bool asked = choice == Choice::fp16 || choice == Choice::bf16;
  if (asked && !(choice == Choice::fp16 ? usable.fp16 : usable.bf16)) {
    fail(INGOT_UNSUPPORTED, "INGOT_CPU_PRODUCT asks for {}, which this machine cannot: AMX is {}",
         choice == Choice::fp16 ? "amx-fp16" : "amx-bf16", usable.state);
  }
  if (!usable.bf16) return nullptr;
  const bool fp16 = usable.fp16 && choice != Choice::bf16;
  return std::make_shared<Product>(fp16 ? "ingot AMX product (fp16)" : "ingot AMX product (bf16)",
                                   *instruction_engine(), fp16 ? Scheme::f3 : Scheme::b6, isa,
                                   false);
}

}  // namespace ingot::cpu::amx
