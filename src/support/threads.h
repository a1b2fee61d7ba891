// Parallel loops on the host process's own OpenMP pool. The library brings no pool of its own into
// a process that has one: two pools spin against each other.
//
// The pool is that of the handle given to set_host_threads, else of an OpenMP runtime already
// loaded into the process, else libgomp.so.1, else plain threads. Counts follow the process's
// setting (torch.set_num_threads, OMP_NUM_THREADS). In a forked child the parent's pool is dead, so
// plain threads are used there.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

namespace ingot {

// Threads that a loop started now, from this thread, would use.
int thread_count();

// handle: an open dlopen handle of the OpenMP runtime (nullptr: find one). threads: at most so many
// (≤ 0: as many as the runtime says).
void set_host_threads(void* handle, int threads);

// What the loops run on, for doctor(): "libgomp of the process", "plain threads", ...
std::string thread_runtime_name();

// True in a child forked after the parent may have used its pool: other libraries' pools hang
// there.
bool in_forked_child();

namespace detail {
using TaskFunction = void (*)(void* body, int64_t task, int worker);
void parallel_for(int64_t tasks, TaskFunction function, void* body, int threads);
}  // namespace detail

// Calls body(task, worker) once for each task in [0, tasks), on several threads, in no fixed order;
// 0 ≤ worker < thread_count(). Returns when all are done. An exception of a body stops the tasks
// that have not begun and is thrown here. Inside another parallel region it runs serially.
// threads: use at most so many (≤ 0: thread_count()).
template <class Body>
void parallel_for(int64_t tasks, Body&& body, int threads = 0) {
  using Plain = std::remove_reference_t<Body>;
  detail::parallel_for(
      tasks,
      [](void* self, int64_t task, int worker) { (*static_cast<Plain*>(self))(task, worker); },
      const_cast<void*>(static_cast<const void*>(&body)), threads);
}

}  // namespace ingot
