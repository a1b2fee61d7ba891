#include "support/threads.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

namespace ingot {
namespace {

TEST(Threads, EveryTaskRunsOnceAndWorkersAreInRange) {
  std::vector<std::atomic<int>> seen(1000);
  const int workers = thread_count();
  parallel_for(1000, [&](int64_t task, int worker) {
    ASSERT_GE(worker, 0);
    ASSERT_LT(worker, workers);
    ++seen[static_cast<size_t>(task)];
  });
  for (const auto& count : seen) EXPECT_EQ(count.load(), 1);
}

TEST(Threads, NoTasksIsNoCall) {
  parallel_for(0, [](int64_t, int) { FAIL(); });
}

TEST(Threads, LimitIsRespected) {
  set_host_threads(nullptr, 1);
  EXPECT_EQ(thread_count(), 1);
  const auto caller = std::this_thread::get_id();
  parallel_for(64, [&](int64_t, int worker) {
    EXPECT_EQ(worker, 0);
    EXPECT_EQ(std::this_thread::get_id(), caller);
  });
  set_host_threads(nullptr, 0);
}

TEST(Threads, NestedLoopsRunSerially) {
  std::atomic<int> total{0};
  parallel_for(8, [&](int64_t, int) {
    EXPECT_EQ(thread_count(), 1);
    parallel_for(8, [&](int64_t, int worker) {
      EXPECT_EQ(worker, 0);
      ++total;
    });
  });
  EXPECT_EQ(total.load(), 64);
}

TEST(Threads, AnExceptionComesBackAndThePoolSurvives) {
  const auto thrower = [](int64_t task, int) {
    if (task == 5) throw std::runtime_error("five");
  };
  EXPECT_THROW(parallel_for(100, thrower), std::runtime_error);
  std::atomic<int> total{0};
  parallel_for(100, [&](int64_t, int) { ++total; });
  EXPECT_EQ(total.load(), 100);
}

TEST(Threads, SeveralCallersAtOnce) {
  std::atomic<int64_t> total{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        parallel_for(32, [&](int64_t task, int) { total += task; });
      }
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(total.load(), 4 * 50 * (31 * 32 / 2));
}

TEST(Threads, AForkedChildComputes) {
  parallel_for(16, [](int64_t, int) {});  // the parent's pool exists
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a hang is a failure, not a stuck test
    std::atomic<int> total{0};
    for (int round = 0; round < 20; ++round) parallel_for(64, [&](int64_t, int) { ++total; });
    _exit(total.load() == 64 * 20 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace ingot
