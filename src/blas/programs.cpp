#include "blas/programs.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <shared_mutex>
#include <tuple>

#include "blas/library.h"
#include "ingot/ingot.h"

namespace ingot::blas {
namespace {

constexpr size_t kMostPrograms = 512, kMostLayouts = 1024, kMostScalars = 16;
constexpr size_t kMostTensors = 4;

struct Ingot {
  decltype(&ingot_abi_version) abi_version = nullptr;
  decltype(&ingot_last_error) last_error = nullptr;
  decltype(&ingot_program_create) create = nullptr;
  decltype(&ingot_program_uses_library) uses_library = nullptr;
  decltype(&ingot_program_workspace_size) workspace_size = nullptr;
  decltype(&ingot_program_prepare) prepare = nullptr;
  decltype(&ingot_program_run) run = nullptr;
  bool complete = false;
};

void say(const std::string& message) {
  std::fprintf(stderr, "ingot: %s\n", message.c_str());
}

// INGOT_LIBRARY, or the one beside this library.
std::string path_of_ingot() {
  if (const char* given = std::getenv("INGOT_LIBRARY"); given != nullptr && *given != '\0') {
    return given;
  }
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&path_of_ingot), &info) == 0) return "libingot.so";
  const std::string own = info.dli_fname;
  const size_t slash = own.rfind('/');
  return slash == std::string::npos ? "libingot.so" : own.substr(0, slash + 1) + "libingot.so";
}

Ingot load_ingot() {
  Ingot l;
  const std::string path = path_of_ingot();
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* error = dlerror();
    say("products are left to cuBLAS: " + std::string(error == nullptr ? path : error));
    return l;
  }
  const auto load = [&](auto& function, const char* name) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(real_dlsym()(handle, name));
    return function != nullptr;
  };
  l.complete = load(l.abi_version, "ingot_abi_version") && load(l.last_error, "ingot_last_error") &&
               load(l.create, "ingot_program_create") &&
               load(l.uses_library, "ingot_program_uses_library") &&
               load(l.workspace_size, "ingot_program_workspace_size") &&
               load(l.prepare, "ingot_program_prepare") && load(l.run, "ingot_program_run") &&
               l.abi_version() == INGOT_ABI_VERSION;
  if (l.complete) {
    say("fp32 products of this process run on Ingot where that pays; INGOT_BLAS=off leaves them "
        "to cuBLAS");
  } else {
    say("products are left to cuBLAS: " + path + " is of another release");
  }
  return l;
}

const Ingot& ingot() {
  static const Ingot loaded = load_ingot();
  return loaded;
}

// All that a launch follows from: of addresses, how they are aligned.
struct Layout {
  int64_t samples;
  std::array<int64_t, 5> strides;
  std::array<uint8_t, 5> low_bits;
  friend auto operator<=>(const Layout&, const Layout&) = default;
};

struct Prepared {
  Outcome outcome = Outcome::failed;
  size_t workspace = 0;
};

struct Program {
  ingot_program* handle = nullptr;
  std::atomic<bool> broken{false};
  std::shared_mutex mutex;
  std::map<Layout, Prepared> layouts;
};

// By w, scalars, epilogue, precision and device.
using Key = std::tuple<int64_t, int64_t, bool, float, float, bool, bool, Outcome, int>;

struct Programs {
  std::shared_mutex mutex;
  std::map<Key, std::unique_ptr<Program>> kept;
  std::set<std::pair<float, float>> scalars;
};

Programs& programs() {
  static Programs& made = *new Programs;  // outlives every static that may multiply at exit
  return made;
}

// A call's tensors, in the order of the graph.
struct Tensors {
  std::array<ingot_tensor, kMostTensors> list{};
  int count = 0;
  Layout layout{};

  void add(const void* data, std::array<int64_t, 4> sizes, std::array<int64_t, 4> strides,
           int device) {
    ingot_tensor& tensor = list[static_cast<size_t>(count++)];
    tensor.data = const_cast<void*>(data);
    std::copy(sizes.begin(), sizes.end(), tensor.sizes);
    std::copy(strides.begin(), strides.end(), tensor.strides);
    tensor.dtype = INGOT_F32;
    tensor.device = device;
  }
};

uint8_t low_bits(const void* address) {
  return static_cast<uint8_t>(reinterpret_cast<uintptr_t>(address) & 15);
}

Tensors tensors_of(const Matrices& m, const Request& request, int device) {
  Tensors t;
  t.add(m.x.data, {m.samples, 1, 1, m.k}, {m.x.row_stride, 0, 0, m.x.k_stride}, device);
  if (m.w.k_stride == 1) {
    t.add(m.w.data, {1, m.features, 1, m.k}, {0, m.w.row_stride, 0, 1}, device);
  } else {
    t.add(m.w.data, {1, m.k, 1, m.features}, {0, m.w.k_stride, 0, m.w.row_stride}, device);
  }
  const auto add_y = [&] {
    t.add(m.y, {m.samples, 1, 1, m.features}, {m.y_stride, 0, 0, 1}, device);
  };
  if (request.scalars.beta != 0) add_y();
  const float* bias = request.epilogue.bias;
  if (bias != nullptr) t.add(bias, {1, 1, 1, m.features}, {0, 0, 0, 1}, device);
  if (request.scalars.beta == 0) add_y();
  t.layout = {m.samples,
              {m.x.row_stride, m.x.k_stride, m.w.row_stride, m.w.k_stride, m.y_stride},
              {low_bits(m.x.data), low_bits(m.w.data), low_bits(m.y), low_bits(bias), 0}};
  return t;
}

std::unique_ptr<Program> make_program(const GraphKey& key, Outcome precision) {
  auto program = std::make_unique<Program>();
  // Calls come with other tensors each time, so none is replayed.
  const char* options =
      precision == Outcome::taken_tf32
          ? R"({"device": "cuda", "precision": "tf32", "capabilities": {"replay": false}})"
          : R"({"device": "cuda", "precision": "fp32", "capabilities": {"replay": false}})";
  if (ingot().create(graph_of(key).c_str(), options, &program->handle) != INGOT_OK) {
    say(std::string("products of one shape are left to cuBLAS: ") + ingot().last_error());
    program->broken = true;
  }
  return program;
}

// nullptr, and why, where no more are kept.
Program* program_of(const Matrices& m, const Request& request, int device, Outcome* why) {
  const Scalars& s = request.scalars;
  const bool bias = request.epilogue.bias != nullptr, relu = request.epilogue.relu;
  const bool along_k = m.w.k_stride == 1;
  const Key key = {m.features, m.k,  along_k,           s.alpha, s.beta,
                   bias,       relu, request.precision, device};
  Programs& all = programs();
  {
    const std::shared_lock lock(all.mutex);
    if (const auto found = all.kept.find(key); found != all.kept.end()) return found->second.get();
  }
  const std::unique_lock lock(all.mutex);
  if (const auto found = all.kept.find(key); found != all.kept.end()) return found->second.get();
  *why = Outcome::shapes;
  if (all.kept.size() >= kMostPrograms) return nullptr;
  *why = Outcome::scalars;  // they are part of the kernels' text
  const bool known = all.scalars.contains({s.alpha, s.beta});
  if (!known && all.scalars.size() >= kMostScalars) return nullptr;
  all.scalars.insert({s.alpha, s.beta});
  auto made = make_program({m.features, m.k, along_k, s, bias, relu}, request.precision);
  return all.kept.emplace(key, std::move(made)).first->second.get();
}

Outcome fail(Program& program, const char* doing) {
  program.broken = true;
  say(std::string("products of one shape are left to cuBLAS, ") + doing + ": " +
      ingot().last_error());
  return Outcome::failed;
}

Prepared prepare(Program& program, const Tensors& t, int device, Outcome precision) {
  const int64_t samples = t.layout.samples;
  Prepared p;
  int uses_library = 0;
  if (ingot().uses_library(program.handle, samples, t.list.data(), t.count, &uses_library) !=
      INGOT_OK) {
    p.outcome = fail(program, "planning");
  } else if (uses_library != 0) {
    p.outcome = Outcome::library_faster;
  } else if (ingot().workspace_size(program.handle, samples, &p.workspace) != INGOT_OK ||
             ingot().prepare(program.handle, samples, device) != INGOT_OK) {
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

Prepared prepared(Program& program, const Tensors& t, const Request& request, int device) {
  if (const auto found = find_prepared(program, t.layout)) return *found;
  // Compiling may allocate, which a captured stream forbids.
  if (is_capturing(request.stream)) return {Outcome::capturing, 0};
  const std::unique_lock lock(program.mutex);
  if (const auto found = program.layouts.find(t.layout); found != program.layouts.end()) {
    return found->second;
  }
  if (program.layouts.size() >= kMostLayouts) return {Outcome::shapes, 0};
  const AllowDuringCapture allow;
  const Prepared made = prepare(program, t, device, request.precision);
  return program.layouts.emplace(t.layout, made).first->second;
}

Answer run_entries(const Request& request, const Place& place) {
  Answer answer;
  const Product& batch = request.product;
  Program* const program = program_of(matrices_of(batch), request, place.device, &answer.outcome);
  if (program == nullptr || program->broken) return answer;
  // All that may be refused is known before anything is launched, but for launches that fail.
  size_t workspace_bytes = 0;
  for (int64_t i = 0; i < batch.batches; ++i) {
    const Tensors t = tensors_of(matrices_of(entry_of(batch, i)), request, place.device);
    const Prepared p = prepared(*program, t, request, place.device);
    if (!is_taken(p.outcome)) return {p.outcome, 0};
    workspace_bytes = std::max(workspace_bytes, p.workspace);
  }
  // A graph would go on using the workspace while others do.
  if (is_capturing(request.stream)) return {Outcome::capturing, 0};
  Workspace& workspace = workspace_of(place, request.stream);
  const std::lock_guard lock(workspace.mutex);
  if (!workspace.reserve(workspace_bytes)) return {Outcome::memory, 0};
  for (; answer.done < batch.batches; ++answer.done) {
    const Tensors t = tensors_of(matrices_of(entry_of(batch, answer.done)), request, place.device);
    if (ingot().run(program->handle, t.layout.samples, t.list.data(), t.count, workspace.memory,
                    workspace.bytes, request.stream) != INGOT_OK) {
      answer.outcome = fail(*program, "launching");
      return answer;
    }
  }
  answer.outcome = request.precision;
  return answer;
}

Answer try_run(const Request& request) {
  const Scalars& s = request.scalars;
  if (s.alpha == 0) return {Outcome::zero_alpha, 0};
  if (!std::isfinite(s.alpha) || !std::isfinite(s.beta)) return {Outcome::scalars, 0};
  const Place place = place_of(request.stream);
  if (!place.known) return {Outcome::device, 0};
  const BelowHook below;
  if (!ingot().complete) return {Outcome::unavailable, 0};
  return run_entries(request, place);
}

}  // namespace

Answer run(const Request& request) {
  try {
    return try_run(request);
  } catch (...) {  // no memory on the host, if anything
    return {Outcome::failed, 0};
  }
}

}  // namespace ingot::blas
