// The entries of a loaded library's tables that hold addresses of other libraries' functions.
#pragma once

#include <link.h>

#include <string>
#include <vector>

namespace ingot::blas {

struct Import {
  const char* name;  // in the library's own text
  void** entry;
};

// A library as the loader lists it.
struct Loaded {
  std::string path;  // empty: the program itself
  ElfW(Addr) base = 0;
  const ElfW(Phdr) * headers = nullptr;
  int header_count = 0;

  friend bool operator==(const Loaded& a, const Loaded& b) {
    return a.base == b.base && a.headers == b.headers && a.path == b.path;
  }
};

struct Listing {
  std::vector<Loaded> libraries;
  unsigned long long loads = 0;  // ever
};
Listing list_loaded();
unsigned long long loads_so_far();

// Holds a library where it is; false if it is no longer there, or has no file.
class Pinned {
 public:
  explicit Pinned(const Loaded& library);
  ~Pinned();
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  explicit operator bool() const { return handle_ != nullptr; }
  void* handle() const { return handle_; }

 private:
  void* handle_ = nullptr;
};

// Those whose names `wanted` says yes to. The library must be pinned.
std::vector<Import> imports_of(const Loaded& library, bool (*wanted)(const char* name));

// Whether an address lies in the library: an entry that was never used points back into it.
bool contains(const Loaded& library, const void* address);

// Also where the loader has closed the table against writing. False where the system forbids it.
bool write_entry(const Loaded& library, void** entry, void* value);

}  // namespace ingot::blas
