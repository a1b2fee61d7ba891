#include "blas/kept_programs.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>

#include "blas/device.h"

namespace ingot::blas {
namespace {

constexpr size_t kMostPrograms = 512, kMostLayouts = 1024, kMostScalars = 16;

using Key = std::tuple<GraphKey, Outcome, int>;  // the precision, the device

struct Programs {
  std::shared_mutex mutex;
  std::map<Key, std::unique_ptr<Program>> kept;
};

Programs& programs() {
  static Programs& made = *new Programs;  // outlives every static that may multiply at exit
  return made;
}

using Extents = std::array<int64_t, 4>;

void add(Tensors& to, const void* data, const Extents& sizes, const Extents& strides, int device) {
  ingot_tensor& tensor = to.list[static_cast<size_t>(to.count++)];
  tensor.data = const_cast<void*>(data);
  std::copy(sizes.begin(), sizes.end(), tensor.sizes);
  std::copy(strides.begin(), strides.end(), tensor.strides);
  tensor.dtype = INGOT_F32;
  tensor.device = device;
}

uint8_t low_bits(const void* address) {
  return static_cast<uint8_t>(reinterpret_cast<uintptr_t>(address) & 15);
}

std::unique_ptr<Program> make_program(const GraphKey& key, Outcome precision) {
  auto program = std::make_unique<Program>();
  // Calls come with other tensors each time, so none is replayed.
  const std::string options =
      std::string(R"({"device": "cuda", "streamed": true, "capabilities": {"replay": false}, )") +
      (precision == Outcome::taken_tf32 ? R"("precision": "tf32"})" : R"("precision": "fp32"})");
  if (ingot().create(graph_of(key).c_str(), options.c_str(), &program->handle) != INGOT_OK) {
    say(std::string("products of one shape are left to cuBLAS: ") + ingot().last_error());
    program->broken = true;
  }
  return program;
}

Prepared prepare(Program& program, const Tensors& t, Outcome precision) {
  const int64_t batch = t.layout.batch;
  Prepared p;
  int uses_library = 0;
  if (ingot().uses_library(program.handle, batch, t.list.data(), t.count, &uses_library) !=
      INGOT_OK) {
    p.outcome = fail(program, "planning");
  } else if (uses_library != 0) {
    p.outcome = Outcome::library_faster;
  } else if (ingot().prepare_call(program.handle, batch, t.list.data(), t.count, &p.workspace) !=
             INGOT_OK) {
    p.outcome = fail(program, "compiling");
  } else {
    p.outcome = precision;
  }
  return p;
}

std::optional<Prepared> find_prepared(Program& program, const Layout& layout) {
  const std::shared_lock lock(program.mutex);
  const auto found = program.layouts.find(layout);
  if (found == program.layouts.end()) return std::nullopt;
  return found->second;
}

}  // namespace

bool scalars_fit(const Scalars& scalars) {
  struct Seen {
    std::mutex mutex;
    std::set<std::pair<float, float>> pairs;
  };
  static Seen& seen = *new Seen;
  const std::lock_guard lock(seen.mutex);
  const std::pair<float, float> pair = {scalars.alpha, scalars.beta};
  if (seen.pairs.contains(pair)) return true;
  if (seen.pairs.size() >= kMostScalars) return false;
  seen.pairs.insert(pair);
  return true;
}

GraphKey key_of(const Matrices& m, const Request& request, bool scalars_in_memory) {
  GraphKey key;
  key.features = m.features;
  key.k = m.k;
  key.batch_rows = m.batches > 1 ? m.samples : 0;
  key.w_along_k = m.w.k_stride == 1;
  key.adds = request.beta != nullptr || request.scalars.beta != 0;
  key.scalars_in_memory = scalars_in_memory;
  if (!scalars_in_memory) key.scalars = request.scalars;
  key.bias = request.epilogue.bias != nullptr;
  key.activation = request.epilogue.activation;
  key.own_bias = key.batch_rows != 0 && key.bias && request.epilogue.bias_stride != 0;
  key.apart = key.adds && m.added.data != nullptr;
  return key;
}

Tensors tensors_of(const GraphKey& key, const Matrices& m, const Request& request, int device) {
  Tensors t;
  // Of one product the rows are the batch.
  const bool batch = key.batch_rows != 0;
  const int64_t batches = batch ? m.batches : m.samples, rows = batch ? m.samples : 1;
  const auto strides = [&](int64_t of_batch, int64_t of_row, int64_t last) {
    return batch ? Extents{of_batch, of_row, 0, last} : Extents{of_row, 0, 0, last};
  };
  const int64_t weights = batch ? m.batches : 1, weight_stride = batch ? m.w.batch_stride : 0;
  add(t, m.x.data, {batches, rows, 1, m.k}, strides(m.x.batch_stride, m.x.row_stride, m.x.k_stride),
      device);
  if (key.w_along_k) {
    add(t, m.w.data, {weights, m.features, 1, m.k}, {weight_stride, m.w.row_stride, 0, 1}, device);
  } else {
    add(t, m.w.data, {weights, m.k, 1, m.features}, {weight_stride, m.w.k_stride, 0, 1}, device);
  }
  const auto add_y = [&] {
    add(t, m.y, {batches, rows, 1, m.features}, strides(m.y_batch_stride, m.y_stride, 1), device);
  };
  const Operand& c = m.added;
  if (key.apart) {
    add(t, c.data, {batches, rows, 1, m.features}, strides(c.batch_stride, c.row_stride, 1),
        device);
  } else if (key.adds) {
    add_y();
  }
  if (key.scalars_in_memory) {
    add(t, request.alpha, {1, 1, 1, 1}, {0, 0, 0, 0}, device);
    if (key.adds) add(t, request.beta, {1, 1, 1, 1}, {0, 0, 0, 0}, device);
  }
  const float* bias = request.epilogue.bias;
  const int64_t bias_stride = key.own_bias ? request.epilogue.bias_stride : 0;
  if (key.bias) {
    add(t, bias, {key.own_bias ? batches : 1, 1, 1, m.features}, {bias_stride, 0, 0, 1}, device);
  }
  if (!key.adds || key.apart) add_y();
  t.layout = {
      batches,
      {m.x.row_stride, m.x.k_stride, m.x.batch_stride, m.w.row_stride, m.w.k_stride,
       m.w.batch_stride, m.y_stride, m.y_batch_stride, c.row_stride, c.batch_stride, bias_stride},
      {low_bits(m.x.data), low_bits(m.w.data), low_bits(m.y), low_bits(bias), low_bits(c.data)}};
  return t;
}

Program* program_of(const GraphKey& graph, Outcome precision, int device) {
  const Key key = {graph, precision, device};
  Programs& all = programs();
  {
    const std::shared_lock lock(all.mutex);
    if (const auto found = all.kept.find(key); found != all.kept.end()) return found->second.get();
  }
  const std::unique_lock lock(all.mutex);
  if (const auto found = all.kept.find(key); found != all.kept.end()) return found->second.get();
  if (all.kept.size() >= kMostPrograms) return nullptr;
  return all.kept.emplace(key, make_program(graph, precision)).first->second.get();
}

Outcome fail(Program& program, const char* doing) {
  program.broken = true;
  say(std::string("products of one shape are left to cuBLAS, ") + doing + ": " +
      ingot().last_error());
  return Outcome::failed;
}

Prepared prepared(Program& program, const Tensors& t, Outcome precision, bool capturing) {
  if (const auto found = find_prepared(program, t.layout)) return *found;
  // Compiling may allocate, which a captured stream forbids.
  if (capturing) return {Outcome::capturing, 0};
  const std::unique_lock lock(program.mutex);
  if (const auto found = program.layouts.find(t.layout); found != program.layouts.end()) {
    return found->second;
  }
  if (program.layouts.size() >= kMostLayouts) return {Outcome::shapes, 0};
  const AllowDuringCapture allow;
  const Prepared made = prepare(program, t, precision);
  return program.layouts.emplace(t.layout, made).first->second;
}

}  // namespace ingot::blas
