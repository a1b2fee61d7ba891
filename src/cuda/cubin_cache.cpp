#include "cuda/cubin_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

namespace ingot::cuda {
namespace {

namespace fs = std::filesystem;

constexpr char kMagic[8] = {'I', 'N', 'G', 'O', 'T', 'C', '0', '1'};
constexpr auto kSuffix = ".cubin";

struct Header {
  char magic[8];
  uint64_t key_bytes, payload_bytes;
  uint64_t hash;  // of key and payload
};

uint64_t content_hash(const std::string& key, const std::string& payload) {
  return XXH3_64bits_withSeed(payload.data(), payload.size(), XXH3_64bits(key.data(), key.size()));
}

// The whole file, or nullopt.
std::optional<std::string> read_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  struct stat info {};
  std::string text;
  bool ok = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  if (ok) {
    text.resize(static_cast<size_t>(info.st_size));
    size_t done = 0;
    while (done < text.size()) {
      const ssize_t count = ::read(fd, text.data() + done, text.size() - done);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) break;
      done += static_cast<size_t>(count);
    }
    ok = done == text.size();
  }
  ::close(fd);
  if (!ok) return std::nullopt;
  return text;
}

bool write_all(int fd, const void* data, size_t size) {
  const char* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t count = ::write(fd, bytes, size);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    bytes += count;
    size -= static_cast<size_t>(count);
  }
  return true;
}

}  // namespace

CubinCache::CubinCache(std::string folder, uint64_t bytes)
    : folder_(std::move(folder)), bytes_(bytes) {
  if (folder_.empty()) return;
  std::error_code failed;
  fs::create_directories(folder_, failed);
}

std::string CubinCache::default_folder() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value != nullptr ? value : "");
  };
  if (const std::string given = variable("INGOT_CACHE_DIR"); !given.empty()) return given;
  if (const std::string xdg = variable("XDG_CACHE_HOME"); !xdg.empty()) return xdg + "/ingot";
  if (const std::string home = variable("HOME"); !home.empty()) return home + "/.cache/ingot";
  return "";
}

std::string CubinCache::file_of(const std::string& key) const {
  const XXH128_hash_t hash = XXH3_128bits(key.data(), key.size());
  return fmt::format("{}/{:016x}{:016x}{}", folder_, hash.high64, hash.low64, kSuffix);
}

std::optional<std::string> CubinCache::find(const std::string& key) const {
  if (folder_.empty()) return std::nullopt;
  const std::string path = file_of(key);
  const std::optional<std::string> file = read_file(path);
  Header header{};
  if (!file || file->size() < sizeof(header)) return std::nullopt;
  std::memcpy(&header, file->data(), sizeof(header));
  const uint64_t rest = file->size() - sizeof(header);
  const bool sizes_fit = std::memcmp(header.magic, kMagic, sizeof(kMagic)) == 0 &&
                         header.key_bytes == key.size() && header.key_bytes <= rest &&
                         header.payload_bytes == rest - header.key_bytes;
  if (!sizes_fit || file->compare(sizeof(header), key.size(), key) != 0) return std::nullopt;
  std::string payload = file->substr(sizeof(header) + key.size());
  if (content_hash(key, payload) != header.hash) return std::nullopt;
  // Marks it as used now; on a read-only disk the order of eviction does not matter.
  ::utimensat(AT_FDCWD, path.c_str(), nullptr, 0);
  return payload;
}

bool CubinCache::store(const std::string& key, const std::string& payload) const {
  if (folder_.empty()) return false;
  static std::atomic<unsigned> counter{0};
  const std::string temporary =
      fmt::format("{}/.{}-{}.tmp", folder_, ::getpid(), counter.fetch_add(1));
  const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return false;
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.key_bytes = key.size();
  header.payload_bytes = payload.size();
  header.hash = content_hash(key, payload);
  bool ok = write_all(fd, &header, sizeof(header)) && write_all(fd, key.data(), key.size()) &&
            write_all(fd, payload.data(), payload.size());
  ok = ::close(fd) == 0 && ok;
  ok = ok && ::rename(temporary.c_str(), file_of(key).c_str()) == 0;
  if (!ok) {
    ::unlink(temporary.c_str());
    return false;
  }
  evict();
  return true;
}

// Other processes may delete and add files meanwhile: an error means that one is gone already.
void CubinCache::evict() const {
  struct Entry {
    fs::path path;
    fs::file_time_type used;
    uint64_t size;
  };
  std::vector<Entry> entries;
  uint64_t total = 0;
  std::error_code failed;
  const auto now = fs::file_time_type::clock::now();
  for (fs::directory_iterator it(folder_, failed), end; !failed && it != end;
       it.increment(failed)) {
    std::error_code gone;
    const fs::path& path = it->path();
    const auto used = fs::last_write_time(path, gone);
    const uint64_t size = gone ? 0 : fs::file_size(path, gone);
    if (gone) continue;
    // Temporary files that old were left behind by a process that died.
    if (path.extension() == ".tmp" && now - used > std::chrono::hours(1)) fs::remove(path, gone);
    if (path.extension() != kSuffix) continue;
    entries.push_back({path, used, size});
    total += size;
  }
  if (total <= bytes_) return;
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.used < b.used; });
  for (const Entry& entry : entries) {
    if (total <= bytes_ / 4 * 3) return;
    std::error_code gone;
    fs::remove(entry.path, gone);
    total -= entry.size;
  }
}

}  // namespace ingot::cuda
