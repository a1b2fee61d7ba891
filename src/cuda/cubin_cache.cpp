#include "cuda/cubin_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <memory>
#include <tuple>
#include <vector>

#include "support/log.h"

namespace ingot::cuda {
namespace {

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

struct Entry {
  std::string name;
  time_t used;
  long used_ns;
  uint64_t size;
};

// The entries in the folder. Temporary files that a process left behind when it died go on the way.
std::vector<Entry> entries_of(const Descriptor& folder) {
  constexpr time_t kLeftBehind = 3600;  // seconds
  std::vector<Entry> entries;
  const int own = ::openat(folder.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(own < 0 ? nullptr : ::fdopendir(own),
                                                    &::closedir);
  if (!listing) return entries;
  const time_t now = ::time(nullptr);
  while (const dirent* found = ::readdir(listing.get())) {
    const std::string name = found->d_name;
    struct stat info {};
    if (::fstatat(folder.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (name.ends_with(kTemporarySuffix) && now - info.st_mtime > kLeftBehind) {
      ::unlinkat(folder.get(), name.c_str(), 0);
    }
    if (!name.ends_with(kSuffix) || !S_ISREG(info.st_mode)) continue;
    entries.push_back(
        {name, info.st_mtim.tv_sec, info.st_mtim.tv_nsec, static_cast<uint64_t>(info.st_size)});
  }
  return entries;
}

}  // namespace

CubinCache::CubinCache(std::string folder, uint64_t bytes)
    : folder_(std::move(folder)), bytes_(bytes) {
  if (folder_.empty()) return;
  make_private_folder(folder_);
  open_folder();  // says now why nothing will be kept
}

Descriptor CubinCache::open_folder() const {
  std::string why;
  Descriptor folder = open_private_folder(folder_, &why);
  if (!why.empty()) warn_once(fmt::format("the kernel cache {} is not used: {}", folder_, why));
  return folder;
}

std::string CubinCache::file_of(const std::string& key) const {
  const XXH128_hash_t hash = XXH3_128bits(key.data(), key.size());
  return fmt::format("{:016x}{:016x}{}", hash.high64, hash.low64, kSuffix);
}

std::optional<std::string> CubinCache::find(const std::string& key) const {
  if (folder_.empty()) return std::nullopt;
  const Descriptor folder = open_folder();
  if (!folder) return std::nullopt;
  const std::string name = file_of(key);
  std::string why;
  const std::optional<std::string> file = read_private_file(folder, name, bytes_, &why);
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
  ::utimensat(folder.get(), name.c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
  return payload;
}

bool CubinCache::store(const std::string& key, const std::string& payload) const {
  if (folder_.empty()) return false;
  const Descriptor folder = open_folder();
  if (!folder) return false;
  std::string temporary;
  Descriptor file = create_private_file(folder, &temporary);
  if (!file) return false;
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.key_bytes = key.size();
  header.payload_bytes = payload.size();
  header.hash = content_hash(key, payload);
  bool ok = write_all(file, &header, sizeof(header)) && write_all(file, key.data(), key.size()) &&
            write_all(file, payload.data(), payload.size());
  ok = file.close() && ok;
  const std::string name = file_of(key);
  ok = ok && ::renameat(folder.get(), temporary.c_str(), folder.get(), name.c_str()) == 0;
  if (!ok) {
    ::unlinkat(folder.get(), temporary.c_str(), 0);
    return false;
  }
  evict(folder);
  return true;
}

// Other processes may delete and add files meanwhile: an error means that one is gone already.
void CubinCache::evict(const Descriptor& folder) const {
  std::vector<Entry> entries = entries_of(folder);
  uint64_t total = 0;
  for (const Entry& entry : entries) total += entry.size;
  if (total <= bytes_) return;
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.used, a.used_ns) < std::tie(b.used, b.used_ns);
  });
  for (const Entry& entry : entries) {
    if (total <= bytes_ / 4 * 3) return;
    ::unlinkat(folder.get(), entry.name.c_str(), 0);
    total -= entry.size;
  }
}

}  // namespace ingot::cuda
