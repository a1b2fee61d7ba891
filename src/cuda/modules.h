// Kernels of a program, compiled when first needed and loaded once per context.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "cuda/canonical_source.h"
#include "cuda/compiler.h"
#include "cuda/context.h"

namespace ingot::cuda {

// A translation unit and the functions that the host launches from it.
struct Unit {
  CompileRequest source;
  std::vector<std::string> functions;
  size_t shared_bytes = 0;  // dynamic, of every function
};

// Functions of one unit in one context, in the order of Unit::functions.
struct LoadedUnit {
  CUmodule module = nullptr;
  std::vector<CUfunction> functions;
};

class Modules {
 public:
  explicit Modules(CubinCache cache) : cache_(std::move(cache)) {}
  ~Modules();

  // A number for the unit, the same for the same source. Thread-safe, as everything here.
  int add(Unit unit);
  // A function of a unit, and a hash of the text that it is in.
  struct Source {
    std::string function;
    uint64_t text_hash = 0;
  };
  Source source(int unit, int function) const;
  // Compiles what is neither compiled nor loaded, for a later load; touches no device.
  void compile(int sm, const std::vector<int>& units);
  // Compiles the first of them that is neither compiled nor loaded; false where there is none. What
  // another thread needs meanwhile does not wait for it.
  bool compile_one(int sm, const std::vector<int>& units);
  // Compiles and loads what is missing, side by side; the context must be current.
  void load(Context& context, const std::vector<int>& units);
  // nullptr where it is not loaded.
  const LoadedUnit* find(const Context& context, int unit) const;

 private:
  struct PerContext {
    CUcontext handle = nullptr;
    std::map<int, std::unique_ptr<LoadedUnit>> loaded;
  };
  // What is loaded, by context and unit, as every launch looks it up: never changed once published.
  struct Table {
    std::vector<std::pair<const Context*, std::vector<const LoadedUnit*>>> contexts;
  };
  std::vector<int> missing(int sm, const std::vector<int>& units) const;
  std::vector<CompileRequest> requests_of(const std::vector<int>& units) const;
  std::vector<std::string> take_code(int sm, const std::vector<int>& units);
  void publish();

  const CubinCache cache_;
  std::mutex loading_;    // one thread loads; the others wait for what it makes
  std::mutex compiling_;  // as much for code; taken inside loading_
  std::map<std::pair<int, int>, std::string> compiled_;  // by sm and unit, until it is loaded
  mutable std::shared_mutex mutex_;                      // of the tables
  std::vector<Unit> units_;
  std::vector<CanonicalSource> compiled_as_;
  std::vector<uint64_t> text_hashes_;
  std::map<std::string, int> index_;
  std::map<Context*, PerContext> contexts_;
  std::atomic<const Table*> table_{nullptr};
  std::vector<std::unique_ptr<const Table>> tables_;  // older ones too: they may be in use
};

}  // namespace ingot::cuda
