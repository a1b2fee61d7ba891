#include "cpu/product/amx/probe.h"

#if defined(__x86_64__) && defined(__linux__)

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace ingot::cpu::amx {
namespace {

struct Trial {
  void (*function)();
};

// The child runs on a stack that the address sanitizer knows nothing of.
#define INGOT_UNCHECKED __attribute__((no_sanitize_address))

// Not fatal to anything but the child, and leaves no core file.
INGOT_UNCHECKED void give_up(int) {
  _exit(1);
}

INGOT_UNCHECKED int child(void* data) {
  struct sigaction action = {};
  action.sa_handler = give_up;
  for (const int signal : {SIGILL, SIGSEGV, SIGBUS, SIGFPE}) sigaction(signal, &action, nullptr);
  static_cast<Trial*>(data)->function();
  _exit(0);
}

template <Scheme S>
INGOT_UNCHECKED void try_pair() {
  static Pair pair;
  alignas(64) static std::byte zeros[kPanelBytes[1] / kSteps];
  alignas(64) static float sums[kPanelRows * kPanelRows];
  pair.a = pair.b = zeros;
  pair.steps = 1;
  pair.sums = sums;
  Update nothing;
  const Engine& engine = *instruction_engine();
  engine.begin();
  engine.multiply[static_cast<int>(S)](pair, &nothing);
  engine.end();
}

}  // namespace

bool survives(void (*function)()) {
  constexpr size_t kStackBytes = 64 << 10;
  const std::unique_ptr<std::byte[]> stack(new std::byte[kStackBytes]);
  const auto top = (reinterpret_cast<uintptr_t>(stack.get()) + kStackBytes) & ~uintptr_t{63};
  Trial trial{function};
  // Like vfork: this thread waits until the child has ended. No exit signal: the host process's
  // SIGCHLD handler hears nothing.
  const int pid = clone(child, reinterpret_cast<void*>(top), CLONE_VM | CLONE_VFORK, &trial);
  if (pid < 0) return false;
  int status = 0, ended = 0;
  do {
    ended = waitpid(pid, &status, __WCLONE);
  } while (ended < 0 && errno == EINTR);
  return ended == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool executes(Scheme scheme) {
  return survives(scheme == Scheme::f3 ? try_pair<Scheme::f3> : try_pair<Scheme::b6>);
}

}  // namespace ingot::cpu::amx

#else

namespace ingot::cpu::amx {
bool survives(void (*)()) {
  return false;
}
bool executes(Scheme) {
  return false;
}
}  // namespace ingot::cpu::amx

#endif
