#include "support/private_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>

namespace ingot {
namespace {

// `info` is filled in either way.
bool is_private(int fd, struct stat* info, std::string* why) {
  if (::fstat(fd, info) != 0) {
    *why = std::strerror(errno);
  } else if (info->st_uid != ::geteuid()) {
    *why = fmt::format("it belongs to user {}, not to user {} who runs this", info->st_uid,
                       ::geteuid());
  } else if ((info->st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    *why = "other users may write to it (`chmod go-w` would stop that)";
  } else {
    return true;
  }
  return false;
}

// None, with the reason, where there is something that cannot be opened.
Descriptor open_at(int folder, const char* path, int flags, std::string* why) {
  Descriptor file(::openat(folder, path, flags | O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  if (!file && errno != ENOENT) *why = errno == ELOOP ? "it is a link" : std::strerror(errno);
  return file;
}

bool read_all(int fd, std::string* text) {
  size_t done = 0;
  while (done < text->size()) {
    const ssize_t count = ::read(fd, text->data() + done, text->size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    done += static_cast<size_t>(count);
  }
  return true;
}

std::optional<std::string> read_at(int folder, const char* path, uint64_t most, std::string* why) {
  // Opening a FIFO would wait for somebody to write to it.
  const Descriptor file = open_at(folder, path, O_NONBLOCK, why);
  struct stat info {};
  if (!file || !is_private(file.get(), &info, why)) return std::nullopt;
  if (!S_ISREG(info.st_mode)) {
    *why = "it is no plain file";
  } else if (static_cast<uint64_t>(info.st_size) > most) {
    *why = fmt::format("it has {} bytes, more than {}", info.st_size, most);
  } else {
    std::string text(static_cast<size_t>(info.st_size), '\0');
    if (read_all(file.get(), &text)) return text;
    *why = "it cannot be read";
  }
  return std::nullopt;
}

}  // namespace

Descriptor::~Descriptor() {
  close();
}

bool Descriptor::close() {
  const int fd = std::exchange(fd_, -1);
  return fd < 0 || ::close(fd) == 0;
}

void make_private_folder(const std::string& path) {
  std::filesystem::path so_far;
  for (const std::filesystem::path& part : std::filesystem::path(path)) {
    so_far /= part;
    ::mkdir(so_far.c_str(), S_IRWXU);
  }
}

Descriptor open_private_folder(const std::string& path, std::string* why) {
  Descriptor folder = open_at(AT_FDCWD, path.c_str(), O_DIRECTORY, why);
  struct stat info {};
  if (!folder || !is_private(folder.get(), &info, why)) return Descriptor();
  return folder;
}

std::optional<std::string> read_private_file(const Descriptor& folder, const std::string& name,
                                             uint64_t most, std::string* why) {
  return read_at(folder.get(), name.c_str(), most, why);
}

std::optional<std::string> read_private_file(const std::string& path, uint64_t most,
                                             std::string* why) {
  return read_at(AT_FDCWD, path.c_str(), most, why);
}

Descriptor create_private_file(const Descriptor& folder, std::string* name) {
  constexpr int kTries = 64;  // other machines may share the folder, and the numbers of processes
  static std::atomic<unsigned> counter{0};
  for (int i = 0; i < kTries; ++i) {
    *name = fmt::format(".{}-{}{}", ::getpid(), counter.fetch_add(1), kTemporarySuffix);
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    Descriptor file(::openat(folder.get(), name->c_str(), flags, S_IRUSR | S_IWUSR));
    if (file || errno != EEXIST) return file;
  }
  return Descriptor();
}

bool write_all(const Descriptor& file, const void* data, size_t size) {
  const char* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t count = ::write(file.get(), bytes, size);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    bytes += count;
    size -= static_cast<size_t>(count);
  }
  return true;
}

}  // namespace ingot
