#include "cuda/cubin_cache.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace ingot::cuda {
namespace {

namespace fs = std::filesystem;

class CubinCacheTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("ingot-cache-test-" + std::to_string(::getpid()));
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::vector<fs::path> files() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(folder_)) found.push_back(entry.path());
    return found;
  }

  fs::path folder_;
};

TEST_F(CubinCacheTest, FindsWhatWasStoredAndNothingElse) {
  const CubinCache cache(folder_.string());
  EXPECT_FALSE(cache.find("key"));
  EXPECT_TRUE(cache.store("key", std::string("code\0more", 9)));
  EXPECT_EQ(cache.find("key"), std::string("code\0more", 9));
  EXPECT_FALSE(cache.find("another key"));
  EXPECT_EQ(files().size(), 1u);
}

TEST_F(CubinCacheTest, DamagedFilesCountAsAbsentAndAreReplaced) {
  const CubinCache cache(folder_.string());
  const std::string payload(1000, 'p');
  ASSERT_TRUE(cache.store("key", payload));
  const fs::path file = files().at(0);
  const auto size = fs::file_size(file);
  for (uintmax_t at = 0; at < size; at += 37) {
    {
      std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
      stream.seekg(static_cast<std::streamoff>(at));
      const char old = static_cast<char>(stream.get());
      stream.seekp(static_cast<std::streamoff>(at));
      stream.put(static_cast<char>(old ^ 0x10));
    }
    EXPECT_FALSE(cache.find("key")) << "byte " << at;
    ASSERT_TRUE(cache.store("key", payload));
    EXPECT_EQ(cache.find("key"), payload);
  }
  for (const uintmax_t length : {uintmax_t{0}, uintmax_t{5}, size - 1}) {
    fs::resize_file(file, length);
    EXPECT_FALSE(cache.find("key")) << "cut to " << length;
    ASSERT_TRUE(cache.store("key", payload));
  }
}

TEST_F(CubinCacheTest, StaysWithinItsBoundAndKeepsWhatWasUsedLast) {
  const CubinCache cache(folder_.string(), 20000);
  for (int i = 0; i < 40; ++i) {
    ASSERT_TRUE(cache.store("key " + std::to_string(i), std::string(1000, 'p')));
    if (i > 0) {
      EXPECT_TRUE(cache.find("key 0")) << i;
    }
    // Times of files tick coarsely.
    std::this_thread::sleep_for(std::chrono::milliseconds(12));
  }
  uintmax_t total = 0;
  for (const fs::path& file : files()) total += fs::file_size(file);
  EXPECT_LE(total, 20000u);
  EXPECT_TRUE(cache.find("key 39"));
  EXPECT_FALSE(cache.find("key 1"));
}

TEST_F(CubinCacheTest, ManyThreadsReadWholeEntriesOnly) {
  const std::string folder = folder_.string();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const CubinCache cache(folder, 30000);
      for (int i = 0; i < 60; ++i) {
        const std::string key = "key " + std::to_string((i + t) % 7);
        const std::string payload(5000 + static_cast<size_t>(i % 7), key.back());
        const auto found = cache.find(key);
        if (found && found->find_first_not_of(key.back()) != std::string::npos) ++wrong;
        cache.store(key, payload);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  for (const fs::path& file : files()) EXPECT_EQ(file.extension(), ".cubin");
}

TEST_F(CubinCacheTest, GoesOnWithoutAFolder) {
  const CubinCache none("");
  EXPECT_FALSE(none.store("key", "code"));
  EXPECT_FALSE(none.find("key"));
  const CubinCache impossible("/proc/ingot-cannot-be-made");
  EXPECT_FALSE(impossible.store("key", "code"));
  EXPECT_FALSE(impossible.find("key"));
}

// What was there before is as good as none, and is replaced or let be; nothing waits.
class CubinCachePlanted : public CubinCacheTest {
 protected:
  void SetUp() override {
    CubinCacheTest::SetUp();
    const CubinCache cache(folder_.string());
    ASSERT_TRUE(cache.store("key", "code"));
    file_ = files().at(0);
    ASSERT_EQ(cache.find("key"), "code");
  }
  std::optional<std::string> found() const { return CubinCache(folder_.string()).find("key"); }
  bool stored() const { return CubinCache(folder_.string()).store("key", "code"); }

  fs::path file_;
};

TEST_F(CubinCachePlanted, FoldersAndFilesAreTheUsersAlone) {
  fs::remove_all(folder_);
  const mode_t before = ::umask(0);  // the most careless
  const CubinCache cache((folder_ / "a" / "kernels").string());
  EXPECT_TRUE(cache.store("key", "code"));
  ::umask(before);
  for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
    EXPECT_EQ(entry.status().permissions() & (fs::perms::group_all | fs::perms::others_all),
              fs::perms::none)
        << entry.path();
  }
}

TEST_F(CubinCachePlanted, AFileThatOthersMayWriteIsNotRead) {
  for (const fs::perms bit : {fs::perms::group_write, fs::perms::others_write}) {
    fs::permissions(file_, bit, fs::perm_options::add);
    EXPECT_FALSE(found());
    EXPECT_TRUE(stored());  // another file, under the same name
    EXPECT_EQ(found(), "code");
  }
}

TEST_F(CubinCachePlanted, AFolderThatOthersMayWriteIsNotUsed) {
  for (const fs::perms bit : {fs::perms::group_write, fs::perms::others_write}) {
    fs::permissions(folder_, bit, fs::perm_options::add);
    EXPECT_FALSE(found());
    EXPECT_FALSE(stored());
    fs::permissions(folder_, bit, fs::perm_options::remove);
    EXPECT_EQ(found(), "code");
  }
}

TEST_F(CubinCachePlanted, FilesAndFoldersOfOtherUsersAreNotUsed) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  ASSERT_EQ(::chown(file_.c_str(), 12345, static_cast<gid_t>(-1)), 0);
  EXPECT_FALSE(found());
  EXPECT_TRUE(stored());
  EXPECT_EQ(found(), "code");
  ASSERT_EQ(::chown(folder_.c_str(), 12345, static_cast<gid_t>(-1)), 0);
  EXPECT_FALSE(found());
  EXPECT_FALSE(stored());
}

TEST_F(CubinCachePlanted, LinksAreNotFollowed) {
  const fs::path other = folder_.string() + "-other";
  fs::rename(file_, other);
  fs::create_symlink(other, file_);
  EXPECT_FALSE(found());
  EXPECT_TRUE(stored());
  EXPECT_FALSE(fs::is_symlink(file_));
  fs::remove(other);
  fs::rename(folder_, other);
  fs::create_directory_symlink(other, folder_);
  EXPECT_FALSE(found());
  EXPECT_FALSE(stored());
  fs::remove_all(other);
}

// The names of temporary files can be guessed: what was put there is not written through.
TEST_F(CubinCachePlanted, TemporaryFilesAreAlwaysNew) {
  const fs::path precious = folder_.string() + "-precious";
  std::ofstream(precious) << "precious";
  for (int i = 0; i < 40; ++i) {
    fs::create_symlink(precious, folder_ / fmt::format(".{}-{}.tmp", ::getpid(), i));
  }
  EXPECT_TRUE(stored());
  EXPECT_EQ(found(), "code");
  EXPECT_EQ(fs::file_size(precious), 8u);
  fs::remove(precious);
}

TEST_F(CubinCachePlanted, AFifoMakesNobodyWait) {
  fs::remove(file_);
  ASSERT_EQ(::mkfifo(file_.c_str(), 0600), 0);
  ::alarm(20);  // ends a test that waits
  EXPECT_FALSE(found());
  EXPECT_TRUE(stored());
  EXPECT_EQ(found(), "code");
  ::alarm(0);
}

TEST_F(CubinCachePlanted, AFileOfTerabytesIsNotRead) {
  ASSERT_EQ(::truncate(file_.c_str(), off_t{8} << 40), 0);
  EXPECT_FALSE(found());
  EXPECT_TRUE(stored());
  EXPECT_EQ(found(), "code");
}

// A limit on the size of files stands in for a full disk: the write stops halfway.
TEST_F(CubinCacheTest, LeavesNothingBehindWhenTheDiskIsFull) {
  const CubinCache cache(folder_.string());
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {2000, 2000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const bool stored = cache.store("key", std::string(100000, 'p'));
    ::_exit(stored || cache.find("key") ? 1 : 0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(files().empty());
}

}  // namespace
}  // namespace ingot::cuda
