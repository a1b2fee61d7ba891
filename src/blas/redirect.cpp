#include "blas/redirect.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

#include "blas/import_table.h"
#include "blas/library.h"
#include "blas/policy.h"

namespace ingot::blas {
namespace {

bool is_dlsym(const char* name) {
  return std::strcmp(name, "dlsym") == 0;
}

bool is_wanted(const char* name) {
  if (name[0] == 'd') return own_dlsym() != nullptr && is_dlsym(name);
  return std::strncmp(name, "cublas", 6) == 0 && exported(name) != nullptr;
}

bool is_cublas(const std::string& path) {
  const size_t slash = path.rfind('/');
  return path.compare(slash == std::string::npos ? 0 : slash + 1, 9, "libcublas") == 0;
}

// What is known of a library that was looked through.
struct Known {
  Loaded library;
  std::vector<Import> imports;
};

struct State {
  std::mutex mutex;
  bool redirecting = false;
  unsigned long long loads = 0;  // as many as there were when it was last looked
  std::vector<Known> known;
  std::set<std::string> unreached;
};

State& state() {
  static State& made = *new State;  // products may come as late as in other libraries' destructors
  return made;
}

std::atomic<bool> redirecting{false};
[[gnu::tls_model("initial-exec")]] thread_local bool looking = false;

// Where the entry leads; for one that was never used, where its first use would lead.
void* target_of(const Loaded& library, void* handle, const Import& import) {
  void* const now = __atomic_load_n(import.entry, __ATOMIC_ACQUIRE);
  const bool unused = now != nullptr && contains(library, now);
  return unused ? real_dlsym()(handle, import.name) : now;
}

// Whether the entry leads here afterwards.
bool redirect(State& s, const Known& known, void* handle, const Import& import) {
  const bool loader = is_dlsym(import.name);
  void* const own = loader ? own_dlsym() : exported(import.name);
  void* const target = target_of(known.library, handle, import);
  if (target == own) return true;
  if (target == nullptr) return false;
  if (loader) {
    // Another's, which may do more than look up, stays.
    if (target != reinterpret_cast<void*>(real_dlsym())) return false;
  } else if (!library_of(import.name).owns(target)) {
    s.unreached.insert(known.library.path);
    return false;
  }
  return write_entry(known.library, import.entry, own);
}

void restore(const Known& known, const Import& import) {
  const bool loader = is_dlsym(import.name);
  void* const own = loader ? own_dlsym() : exported(import.name);
  if (__atomic_load_n(import.entry, __ATOMIC_ACQUIRE) != own) return;
  void* const real =
      loader ? reinterpret_cast<void*>(real_dlsym()) : library_of(import.name).find(import.name);
  if (real != nullptr) write_entry(known.library, import.entry, real);
}

// cuBLAS's own calls, Ingot's and this library's stay what they are.
bool is_left_alone(const Loaded& library) {
  if (is_cublas(library.path)) return true;
  const void* const inside = library.headers;
  Dl_info own{};
  dladdr(reinterpret_cast<void*>(&is_left_alone), &own);
  return is_ingot(inside) || reinterpret_cast<void*>(library.base) == own.dli_fbase;
}

// Looks through what was loaded since the last time, and forgets what is gone.
void look(State& s) {
  Listing listing = list_loaded();
  s.loads = listing.loads;
  std::vector<Known> kept;
  for (Loaded& library : listing.libraries) {
    const auto found = std::find_if(s.known.begin(), s.known.end(),
                                    [&](const Known& k) { return k.library == library; });
    if (found != s.known.end()) {
      kept.push_back(std::move(*found));
      s.known.erase(found);
      continue;
    }
    Known made{std::move(library), {}};
    if (const Pinned pinned(made.library); pinned && !is_left_alone(made.library)) {
      made.imports = imports_of(made.library, is_wanted);
    }
    kept.push_back(std::move(made));
  }
  s.known = std::move(kept);
}

// How many of cuBLAS's products lead here now.
int redirect_all(State& s) {
  int count = 0;
  look(s);
  s.unreached.clear();
  for (const Known& known : s.known) {
    if (known.imports.empty()) continue;
    const Pinned pinned(known.library);
    if (!pinned) continue;
    for (const Import& import : known.imports) {
      if (redirect(s, known, pinned.handle(), import) && !is_dlsym(import.name)) ++count;
    }
  }
  return count;
}

void restore_all(State& s) {
  for (const Known& known : s.known) {
    if (known.imports.empty()) continue;
    const Pinned pinned(known.library);
    if (!pinned) continue;
    for (const Import& import : known.imports) restore(known, import);
  }
}

// While one lives, this thread's own use of the loader is not looked at.
struct Looking {
  Looking() { looking = true; }
  ~Looking() { looking = false; }
};

}  // namespace

void redirect_what_was_loaded() {
  if (!redirecting.load(std::memory_order_acquire) || looking) return;
  const Looking now;
  State& s = state();
  // Whoever holds it looks; to wait could be to wait for a thread that waits for the loader.
  const std::unique_lock lock(s.mutex, std::try_to_lock);
  if (!lock || !s.redirecting || loads_so_far() == s.loads) return;
  redirect_all(s);
}

}  // namespace ingot::blas

using namespace ingot::blas;

int ingot_blas_enable() {
  if (!settings().on) return -1;
  switch_to(true);
  if (ingot_blas_preloaded() != 0) return 0;
  const Looking now;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.redirecting = true;
  redirecting.store(true, std::memory_order_release);
  return redirect_all(s);
}

void ingot_blas_disable() {
  switch_to(false);
  const Looking now;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (!s.redirecting) return;
  s.redirecting = false;
  redirecting.store(false, std::memory_order_release);
  restore_all(s);
}

const char* ingot_blas_unreached() {
  static thread_local std::string text;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  text.clear();
  for (const std::string& path : s.unreached) text += path + "\n";
  return text.c_str();
}

int ingot_blas_preloaded() {
  // As the program itself would find it.
  void* const program = dlopen(nullptr, RTLD_LAZY);
  const bool first = real_dlsym()(program, "cublasSgemm_v2") == exported("cublasSgemm_v2");
  dlclose(program);
  return first ? 1 : 0;
}
