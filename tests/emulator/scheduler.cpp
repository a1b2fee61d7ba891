// Runs a kernel's blocks one after another, the threads of a block as fibers of one thread: each
// until it waits for others, in the order of their numbers, over and over.
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <vector>

#include "cuda_on_host.h"

EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;
unsigned emulator::dynamic_shared_bytes;

namespace ingot {
constexpr std::size_t kMostShared = std::size_t{256} << 10;
// What SharedRow declares, and what packing passes do, which are not run.
EMULATOR_API alignas(16) unsigned char row_memory[kMostShared];
EMULATOR_API alignas(16) unsigned char column_memory[1];
}  // namespace ingot

namespace {

constexpr int kWarp = 32;
constexpr std::size_t kStack = std::size_t{128} << 10, kRegisters = std::size_t{16} << 10;

enum class Waits { no, block, barrier, shown, looked, ended };

struct Fiber {
  ucontext_t context;
  Waits waits = Waits::no;
  int barrier = 0, threads = 0;
};

std::vector<Fiber> fibers;
std::vector<std::unique_ptr<char[]>> stacks;
std::vector<unsigned char> shown;  // by thread
ucontext_t scheduler;
std::size_t current;
void (*kernel)(void**);
void** arguments;

void wait(Waits for_what) {
  fibers[current].waits = for_what;
  swapcontext(&fibers[current].context, &scheduler);
}

void run_thread() {
  kernel(arguments);
  wait(Waits::ended);
}

void begin_block(unsigned block, std::size_t threads) {
  // What is not written is not a number.
  std::memset(ingot::row_memory, 0xff, sizeof ingot::row_memory);
  blockIdx.x = block;
  for (std::size_t t = 0; t < threads; ++t) {
    std::memset(stacks[t].get() + kStack - kRegisters, 0xff, kRegisters);  // stacks grow downwards
    Fiber& fiber = fibers[t];
    fiber.waits = Waits::no;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks[t].get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, run_thread, 0);
  }
}

// Lets those of fibers [begin, end) go on that wait so, if all do that have not ended.
bool release(std::size_t begin, std::size_t end, Waits so) {
  std::size_t waiting = 0, alive = 0;
  for (std::size_t t = begin; t < end; ++t) {
    waiting += fibers[t].waits == so;
    alive += fibers[t].waits != Waits::ended;
  }
  if (waiting == 0 || waiting != alive) return false;
  for (std::size_t t = begin; t < end; ++t) {
    if (fibers[t].waits == so) fibers[t].waits = Waits::no;
  }
  return true;
}

bool release_barriers() {
  std::map<int, int> waiting;
  for (const Fiber& fiber : fibers) waiting[fiber.barrier] += fiber.waits == Waits::barrier;
  bool any = false;
  for (Fiber& fiber : fibers) {
    if (fiber.waits != Waits::barrier || waiting[fiber.barrier] != fiber.threads) continue;
    fiber.waits = Waits::no;
    any = true;
  }
  return any;
}

bool release_all() {
  bool any = release_barriers();
  for (std::size_t first = 0; first < fibers.size(); first += kWarp) {
    const std::size_t end = std::min(first + kWarp, fibers.size());
    for (const Waits so : {Waits::shown, Waits::looked}) any = release(first, end, so) || any;
  }
  return release(0, fibers.size(), Waits::block) || any;
}

// False where all threads wait for one another.
bool run_block() {
  for (;;) {
    bool ended = true;
    for (current = 0; current < fibers.size(); ++current) {
      if (fibers[current].waits == Waits::no) {
        threadIdx.x = static_cast<unsigned>(current);
        swapcontext(&scheduler, &fibers[current].context);
      }
      ended = ended && fibers[current].waits == Waits::ended;
    }
    if (ended) return true;
    if (!release_all()) return false;
  }
}

}  // namespace

void emulator::wait_for_block() {
  wait(Waits::block);
}
void emulator::wait_at_barrier(int id, int threads) {
  fibers[current].barrier = id;
  fibers[current].threads = threads;
  wait(Waits::barrier);
}
int emulator::lane() {
  return static_cast<int>(current % kWarp);
}
void emulator::show(const void* value, std::size_t bytes) {
  std::memcpy(&shown[current * kMostShown], value, bytes);
  wait(Waits::shown);
}
void emulator::look(int lane, void* value, std::size_t bytes) {
  const std::size_t thread = current / kWarp * kWarp + static_cast<std::size_t>(lane);
  std::memcpy(value, &shown[thread * kMostShown], bytes);
}
void emulator::looked() {
  wait(Waits::looked);
}

// Whether it came to its end. kernel: takes pointers to its arguments.
extern "C" EMULATOR_API int run_kernel(void (*function)(void**), void** given, std::int64_t blocks,
                                       int threads, std::size_t shared_bytes) {
  if (shared_bytes > ingot::kMostShared) return 0;
  const auto count = static_cast<std::size_t>(threads);
  kernel = function;
  arguments = given;
  emulator::dynamic_shared_bytes = static_cast<unsigned>(shared_bytes);
  gridDim.x = static_cast<unsigned>(blocks);
  blockDim.x = static_cast<unsigned>(threads);
  while (stacks.size() < count) stacks.push_back(std::make_unique<char[]>(kStack));
  fibers.resize(count);
  shown.assign((count + kWarp) * emulator::kMostShown, 0);
  for (unsigned block = 0; block < gridDim.x; ++block) {
    begin_block(block, count);
    if (!run_block()) return 0;
  }
  return 1;
}
