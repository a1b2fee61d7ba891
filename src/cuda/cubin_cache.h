// Compiled kernels on disk, shared by all processes of a user.
//
// An entry is one file that holds its whole key and payload with their hash; a hit compares the
// whole key. Files appear by rename, whole or not at all; a file that is damaged counts as absent
// and is replaced. When the folder outgrows its bound, the files used longest ago go. A folder that
// cannot be written, or a full disk, costs the caching and nothing else; so do folders and files of
// other users, or that others may write to (support/private_files.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "support/private_files.h"

namespace ingot::cuda {

class CubinCache {
 public:
  static constexpr uint64_t kDefaultBytes = uint64_t{256} << 20;

  // An empty folder: no caching.
  explicit CubinCache(std::string folder, uint64_t bytes = kDefaultBytes);

  std::optional<std::string> find(const std::string& key) const;
  // Whether the entry is on disk now.
  bool store(const std::string& key, const std::string& payload) const;

  const std::string& folder() const { return folder_; }

 private:
  Descriptor open_folder() const;
  std::string file_of(const std::string& key) const;
  void evict(const Descriptor& folder) const;

  std::string folder_;
  uint64_t bytes_;
};

}  // namespace ingot::cuda
