#include "cuda/modules.h"

#include <xxhash.h>

#include <algorithm>
#include <set>

#include "support/error.h"

namespace ingot::cuda {

Modules::~Modules() {
  // At exit, or in a forked child, the driver may be gone already; it frees the modules itself.
  const Driver* d = try_driver(nullptr);
  if (d == nullptr) return;
  for (auto& [context, own] : contexts_) {
    if (d->cuCtxPushCurrent(own.handle) != kCudaSuccess) continue;
    for (auto& [unit, loaded] : own.loaded) d->cuModuleUnload(loaded->module);
    CUcontext popped = nullptr;
    d->cuCtxPopCurrent(&popped);
  }
}

int Modules::add(Unit unit) {
  {
    const std::shared_lock lock(mutex_);
    if (const auto found = index_.find(unit.source.text); found != index_.end()) {
      return found->second;
    }
  }
  const std::unique_lock lock(mutex_);
  const auto [found, inserted] =
      index_.try_emplace(unit.source.text, static_cast<int>(units_.size()));
  if (inserted) {
    text_hashes_.push_back(XXH3_64bits(unit.source.text.data(), unit.source.text.size()));
    compiled_as_.push_back(canonical_source(unit.source, unit.functions));
    units_.push_back(std::move(unit));
  }
  return found->second;
}

Modules::Source Modules::source(int unit, int function) const {
  const std::shared_lock lock(mutex_);
  const auto index = static_cast<size_t>(unit);
  return {units_[index].functions[static_cast<size_t>(function)], text_hashes_[index]};
}

// With compiling_ held.
std::vector<int> Modules::missing(int sm, const std::vector<int>& wanted) const {
  std::vector<int> missing;
  const std::shared_lock lock(mutex_);
  for (const int unit : std::set<int>(wanted.begin(), wanted.end())) {
    const bool loaded = std::any_of(contexts_.begin(), contexts_.end(), [&](const auto& own) {
      return own.second.loaded.contains(unit);
    });
    if (!loaded && !compiled_.contains({sm, unit})) missing.push_back(unit);
  }
  return missing;
}

void Modules::compile(int sm, const std::vector<int>& wanted) {
  const std::lock_guard compiling(compiling_);
  const std::vector<int> units = missing(sm, wanted);
  std::vector<std::string> code = compile_all(requests_of(units), sm, cache_);
  for (size_t i = 0; i < units.size(); ++i) compiled_[{sm, units[i]}] = std::move(code[i]);
}

bool Modules::compile_one(int sm, const std::vector<int>& wanted) {
  std::vector<int> units;
  {
    const std::lock_guard compiling(compiling_);
    units = missing(sm, wanted);
  }
  if (units.empty()) return false;
  std::vector<std::string> code = compile_all(requests_of({units[0]}), sm, cache_);
  const std::lock_guard compiling(compiling_);
  compiled_[{sm, units[0]}] = std::move(code[0]);
  return true;
}

std::vector<CompileRequest> Modules::requests_of(const std::vector<int>& units) const {
  const std::shared_lock lock(mutex_);
  std::vector<CompileRequest> requests;
  for (const int unit : units) requests.push_back(compiled_as_[static_cast<size_t>(unit)].request);
  return requests;
}

// In order; compiled now unless `compile` has.
std::vector<std::string> Modules::take_code(int sm, const std::vector<int>& units) {
  const std::lock_guard compiling(compiling_);
  std::map<int, std::string> code;
  std::vector<int> missing;
  for (const int unit : units) {
    if (auto found = compiled_.extract({sm, unit})) {
      code[unit] = std::move(found.mapped());
    } else {
      missing.push_back(unit);
    }
  }
  std::vector<std::string> made = compile_all(requests_of(missing), sm, cache_);
  for (size_t i = 0; i < missing.size(); ++i) code[missing[i]] = std::move(made[i]);
  std::vector<std::string> taken;
  for (const int unit : units) taken.push_back(std::move(code[unit]));
  return taken;
}

void Modules::load(Context& context, const std::vector<int>& wanted) {
  const std::lock_guard loading(loading_);
  std::vector<int> missing;
  std::vector<Unit> units;
  {
    const std::shared_lock lock(mutex_);
    const auto own = contexts_.find(&context);
    for (const int unit : std::set<int>(wanted.begin(), wanted.end())) {
      if (own != contexts_.end() && own->second.loaded.contains(unit)) continue;
      missing.push_back(unit);
      units.push_back(units_[static_cast<size_t>(unit)]);
      units.back().functions = compiled_as_[static_cast<size_t>(unit)].functions;
    }
  }
  if (missing.empty()) return;
  const std::vector<std::string> code = take_code(context.sm(), missing);
  // Whatever was loaded is published, also where the next one does not fit.
  const std::unique_ptr<Modules, void (*)(Modules*)> at_end(
      this, [](Modules* modules) { modules->publish(); });

  const Driver& d = driver();
  for (size_t i = 0; i < missing.size(); ++i) {
    auto loaded = std::make_unique<LoadedUnit>();
    check(d.cuModuleLoadData(&loaded->module, code[i].c_str()), "loading a kernel");
    for (const std::string& name : units[i].functions) {
      CUfunction function = nullptr;
      check(d.cuModuleGetFunction(&function, loaded->module, name.c_str()), "looking for a kernel");
      if (units[i].shared_bytes > 0) {
        check(d.cuFuncSetAttribute(function, kMaxDynamicSharedBytes,
                                   static_cast<int>(units[i].shared_bytes)),
              "reserving shared memory");
      }
      loaded->functions.push_back(function);
    }
    const std::unique_lock lock(mutex_);
    PerContext& own = contexts_[&context];
    own.handle = context.handle();
    own.loaded[missing[i]] = std::move(loaded);
  }
}

void Modules::publish() {
  const std::unique_lock lock(mutex_);
  auto table = std::make_unique<Table>();
  for (const auto& [context, own] : contexts_) {
    std::vector<const LoadedUnit*> loaded(units_.size(), nullptr);
    for (const auto& [unit, code] : own.loaded) loaded[static_cast<size_t>(unit)] = code.get();
    table->contexts.emplace_back(context, std::move(loaded));
  }
  table_.store(table.get(), std::memory_order_release);
  tables_.push_back(std::move(table));
}

const LoadedUnit* Modules::find(const Context& context, int unit) const {
  const Table* table = table_.load(std::memory_order_acquire);
  if (table == nullptr) return nullptr;
  const auto index = static_cast<size_t>(unit);
  for (const auto& [own, loaded] : table->contexts) {
    if (own == &context) return index < loaded.size() ? loaded[index] : nullptr;
  }
  return nullptr;
}

}  // namespace ingot::cuda
