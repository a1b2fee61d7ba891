#include "support/threads.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace ingot {
namespace {

// The entry points that compilers call in libgomp; the OpenMP runtimes of LLVM and Intel have them
// too.
struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*max_threads)() = nullptr;
  int (*thread_num)() = nullptr;
  int (*in_parallel)() = nullptr;
  std::string name;
};

bool resolve(void* handle, OpenMp* openmp) {
  const auto find = [&](const char* symbol, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, symbol));
    return function != nullptr;
  };
  return find("GOMP_parallel", openmp->parallel) &&
         find("omp_get_max_threads", openmp->max_threads) &&
         find("omp_get_thread_num", openmp->thread_num) &&
         find("omp_in_parallel", openmp->in_parallel);
}

int collect_openmp_libraries(dl_phdr_info* info, size_t, void* paths) {
  const std::string path = info->dlpi_name != nullptr ? info->dlpi_name : "";
  const std::string file = path.substr(path.rfind('/') + 1);
  for (const char* prefix : {"libgomp", "libiomp5", "libomp"}) {
    if (file.starts_with(prefix)) static_cast<std::vector<std::string>*>(paths)->push_back(path);
  }
  return 0;
}

OpenMp find_openmp() {
  OpenMp openmp;
  if (resolve(RTLD_DEFAULT, &openmp)) {
    openmp.name = "the process's OpenMP runtime";
    return openmp;
  }
  std::vector<std::string> paths;
  dl_iterate_phdr(collect_openmp_libraries, &paths);
  for (const std::string& path : paths) {
    void* handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (handle != nullptr && resolve(handle, &openmp)) {
      openmp.name = path + " (already loaded)";
      return openmp;
    }
  }
  void* handle = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_GLOBAL);
  if (handle != nullptr && resolve(handle, &openmp)) {
    openmp.name = "libgomp.so.1";
    return openmp;
  }
  return {};
}

// Threads of our own, for processes without OpenMP and for forked children.
class PlainPool {
 public:
  explicit PlainPool(int threads) : size_(threads) {
    for (int i = 1; i < threads; ++i) {
      std::thread([this, i] { work(i); }).detach();
    }
  }

  int size() const { return size_; }

  // False where another thread is using the pool; the caller then runs alone.
  bool run(int workers, void (*function)(void*, int), void* data) {
    const std::unique_lock owner(owner_, std::try_to_lock);
    if (!owner.owns_lock()) return false;
    {
      const std::lock_guard lock(mutex_);
      function_ = function;
      data_ = data;
      workers_ = workers;
      running_ = workers - 1;
      ++generation_;
    }
    start_.notify_all();
    function(data, 0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    return true;
  }

 private:
  void work(int worker) {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    while (true) {
      start_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (worker >= workers_) continue;
      const auto function = function_;
      void* const data = data_;
      lock.unlock();
      function(data, worker);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  const int size_;
  std::mutex owner_, mutex_;
  std::condition_variable start_, done_;
  uint64_t generation_ = 0;
  int workers_ = 0, running_ = 0;
  void (*function_)(void*, int) = nullptr;
  void* data_ = nullptr;
};

int default_plain_threads() {
  const char* asked = std::getenv("OMP_NUM_THREADS");
  const int count = asked != nullptr ? std::atoi(asked) : 0;
  return count > 0 ? count : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// Everything here is reached through pointers that are replaced, never changed or freed: loops that
// are under way finish with what they began with, and nothing is destroyed at exit under a thread.
struct State {
  std::atomic<const OpenMp*> openmp{nullptr};
  std::atomic<PlainPool*> plain{nullptr};
  std::atomic<int> limit{0};
  std::atomic<bool> pool_used{false};
  std::atomic<bool> forked{false};
};

void after_fork_in_child();

State& state() {
  static State* const instance = [] {
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
    return new State;
  }();
  return *instance;
}

// Only stores to atomics: the child of a threaded process may do little else here.
void after_fork_in_child() {
  State& s = state();
  if (s.pool_used.load()) s.forked.store(true);
  s.plain.store(nullptr);
}

const OpenMp& openmp() {
  State& s = state();
  const OpenMp* found = s.openmp.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  const OpenMp* fresh = new OpenMp(find_openmp());
  if (s.openmp.compare_exchange_strong(found, fresh)) return *fresh;
  delete fresh;
  return *found;
}

bool use_openmp() {
  return !state().forked.load() && openmp().parallel != nullptr;
}

PlainPool& plain_pool() {
  State& s = state();
  PlainPool* pool = s.plain.load(std::memory_order_acquire);
  if (pool != nullptr) return *pool;
  PlainPool* fresh = new PlainPool(default_plain_threads());
  // Where another thread was first, the twin's threads sleep for ever.
  return s.plain.compare_exchange_strong(pool, fresh) ? *fresh : *pool;
}

thread_local bool inside_loop = false;

// Loops begun while this lives run serially.
struct Inside {
  const bool outer = inside_loop;
  Inside() { inside_loop = true; }
  ~Inside() { inside_loop = outer; }
};

// Neighbouring tasks that one worker does as long as it keeps up.
struct alignas(64) Share {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};
constexpr int kMostShares = 64;

// Each worker begins with its own share, which is cut as PyTorch cuts its loops: what one loop, of
// either library, wrote the next one finds in the same core's cache. Then it helps the others.
struct Loop {
  detail::TaskFunction function;
  void* body;
  const OpenMp* openmp = nullptr;
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  std::array<Share, kMostShares> shares;
  int count;

  Loop(int64_t tasks, int workers, detail::TaskFunction function, void* body)
      : function(function), body(body), count(std::min(workers, kMostShares)) {
    for (int i = 0; i < count; ++i) {
      Share& share = shares[static_cast<size_t>(i)];
      share.next.store(tasks * i / count, std::memory_order_relaxed);
      share.end = tasks * (i + 1) / count;
    }
  }

  void work(int worker) {
    const Inside inside;
    for (int i = 0; i < count; ++i)
      work_on(shares[static_cast<size_t>((worker + i) % count)], worker);
  }

 private:
  void work_on(Share& share, int worker) {
    while (!failed.load(std::memory_order_relaxed)) {
      const int64_t task = share.next.fetch_add(1, std::memory_order_relaxed);
      if (task >= share.end) break;
      try {
        function(body, task, worker);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
  }
};

int workers_for(int64_t tasks, int threads) {
  if (tasks == 1 || threads == 1) return 1;
  const int limit = thread_count();
  const int allowed = threads > 0 ? std::min(threads, limit) : limit;
  return static_cast<int>(std::min<int64_t>(tasks, allowed));
}

}  // namespace

int thread_count() {
  if (inside_loop) return 1;
  State& s = state();
  int count = 0;
  if (openmp().parallel != nullptr) {  // asking is safe in a forked child too
    count = openmp().in_parallel() != 0 ? 1 : openmp().max_threads();
  } else {
    count = default_plain_threads();
  }
  const int limit = s.limit.load();
  return std::max(1, limit > 0 ? std::min(limit, count) : count);
}

void set_host_threads(void* handle, int threads) {
  State& s = state();
  s.limit.store(threads);
  if (handle == nullptr) return;
  OpenMp given;
  if (!resolve(handle, &given)) return;
  given.name = "the host process's OpenMP runtime";
  s.openmp.store(new OpenMp(given), std::memory_order_release);
}

std::string thread_runtime_name() {
  return use_openmp() ? openmp().name : "plain threads";
}

bool in_forked_child() {
  return state().forked.load();
}

namespace detail {

void parallel_for(int64_t tasks, TaskFunction function, void* body, int threads) {
  if (tasks <= 0) return;
  const int workers = workers_for(tasks, threads);
  if (workers == 1) {
    const Inside inside;
    for (int64_t task = 0; task < tasks; ++task) function(body, task, 0);
    return;
  }
  Loop loop(tasks, workers, function, body);
  state().pool_used.store(true, std::memory_order_relaxed);
  if (use_openmp()) {
    loop.openmp = &openmp();
    const auto enter = [](void* self) {
      Loop* const shared = static_cast<Loop*>(self);
      shared->work(shared->openmp->thread_num());
    };
    loop.openmp->parallel(enter, &loop, static_cast<unsigned>(workers), 0);
  } else {
    const auto enter = [](void* self, int worker) { static_cast<Loop*>(self)->work(worker); };
    PlainPool& pool = plain_pool();
    if (!pool.run(std::min(workers, pool.size()), enter, &loop)) loop.work(0);
  }
  if (loop.error) std::rethrow_exception(loop.error);
}

}  // namespace detail
}  // namespace ingot
