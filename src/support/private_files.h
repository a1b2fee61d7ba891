// Files that nobody but this user can have written. Code that is loaded into a process, and what
// decides how it runs, is read from no others; and nothing found in their place can make us wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace ingot {

// An open file, closed with it.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  // False where closing failed: something of what was written may be lost.
  bool close();

 private:
  int fd_;
};

// Makes the folder and what is missing above it, for this user alone; failures show when it is
// opened.
void make_private_folder(const std::string& path);

// None where it is absent, no folder (a link is none), another user's, or others may write to it.
// `why` stays empty where it is absent.
Descriptor open_private_folder(const std::string& path, std::string* why);

// How the names of create_private_file() end: what a process left behind when it died.
inline constexpr const char* kTemporarySuffix = ".tmp";

// A new file in a folder, of no other name's memory; `name` is what it was given. None where it
// cannot be.
Descriptor create_private_file(const Descriptor& folder, std::string* name);
bool write_all(const Descriptor& file, const void* data, size_t size);

// The whole text of a file. None where it is absent, larger than `most` bytes, no plain file (a
// link or a FIFO is none), another user's, or others may write to it. `why` as above.
std::optional<std::string> read_private_file(const Descriptor& folder, const std::string& name,
                                             uint64_t most, std::string* why);
std::optional<std::string> read_private_file(const std::string& path, uint64_t most,
                                             std::string* why);

}  // namespace ingot
