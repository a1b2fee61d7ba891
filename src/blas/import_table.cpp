#include "blas/import_table.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace ingot::blas {
namespace {

#if defined(__x86_64__)
constexpr unsigned kJumpSlot = R_X86_64_JUMP_SLOT, kGlobalData = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
constexpr unsigned kJumpSlot = R_AARCH64_JUMP_SLOT, kGlobalData = R_AARCH64_GLOB_DAT;
#else
constexpr unsigned kJumpSlot = ~0u, kGlobalData = ~0u;  // nothing is redirected
#endif

// What a library's dynamic section says of its relocations.
struct Tables {
  const ElfW(Rela) * jumps = nullptr, *others = nullptr;
  size_t jump_bytes = 0, other_bytes = 0, relative = 0;
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  bool with_addends = true;
};

const ElfW(Phdr) * header_of(const Loaded& library, ElfW(Word) type) {
  for (int i = 0; i < library.header_count; ++i) {
    if (library.headers[i].p_type == type) return &library.headers[i];
  }
  return nullptr;
}

Tables tables_of(const Loaded& library) {
  Tables t;
  const ElfW(Phdr)* header = header_of(library, PT_DYNAMIC);
  if (header == nullptr) return t;
  // The C library's loader has made addresses of the offsets; others' may have left them.
  const auto address = [&](ElfW(Addr) value) {
    return value < library.base ? value + library.base : value;
  };
  for (auto* d = reinterpret_cast<const ElfW(Dyn)*>(library.base + header->p_vaddr);
       d->d_tag != DT_NULL; ++d) {
    const ElfW(Addr) at = address(d->d_un.d_ptr);
    switch (d->d_tag) {
      case DT_JMPREL:
        t.jumps = reinterpret_cast<const ElfW(Rela)*>(at);
        break;
      case DT_PLTRELSZ:
        t.jump_bytes = d->d_un.d_val;
        break;
      case DT_PLTREL:
        t.with_addends = d->d_un.d_val == DT_RELA;
        break;
      case DT_RELA:
        t.others = reinterpret_cast<const ElfW(Rela)*>(at);
        break;
      case DT_RELASZ:
        t.other_bytes = d->d_un.d_val;
        break;
      case DT_RELACOUNT:
        t.relative = d->d_un.d_val;
        break;
      case DT_SYMTAB:
        t.symbols = reinterpret_cast<const ElfW(Sym)*>(at);
        break;
      case DT_STRTAB:
        t.names = reinterpret_cast<const char*>(at);
        break;
      default:
        break;
    }
  }
  return t;
}

// The part of a library that the loader makes read-only once it is filled, in whole pages.
bool is_closed(const Loaded& library, uintptr_t address, uintptr_t page) {
  const ElfW(Phdr)* header = header_of(library, PT_GNU_RELRO);
  if (header == nullptr) return false;
  const uintptr_t begin = library.base + header->p_vaddr, end = begin + header->p_memsz;
  return address >= begin / page * page && address < end / page * page;
}

}  // namespace

Listing list_loaded() {
  Listing listing;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& to = *static_cast<Listing*>(data);
        to.loads = info->dlpi_adds;
        to.libraries.push_back({info->dlpi_name == nullptr ? "" : info->dlpi_name, info->dlpi_addr,
                                info->dlpi_phdr, info->dlpi_phnum});
        return 0;
      },
      &listing);
  return listing;
}

unsigned long long loads_so_far() {
  unsigned long long loads = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        *static_cast<unsigned long long*>(data) = info->dlpi_adds;
        return 1;
      },
      &loads);
  return loads;
}

// Opening takes the loader's lock, which whoever is loading this library holds until it is whole.
Pinned::Pinned(const Loaded& library) {
  const char* path = library.path.empty() ? nullptr : library.path.c_str();
  handle_ = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (handle_ == nullptr) return;
  link_map* map = nullptr;
  if (dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0 && map->l_addr == library.base) return;
  dlclose(handle_);
  handle_ = nullptr;
}

Pinned::~Pinned() {
  if (handle_ != nullptr) dlclose(handle_);
}

std::vector<Import> imports_of(const Loaded& library, bool (*wanted)(const char* name)) {
  std::vector<Import> found;
  const Tables t = tables_of(library);
  if (t.symbols == nullptr || t.names == nullptr || !t.with_addends) return found;
  const auto search = [&](const ElfW(Rela) * table, size_t bytes, size_t from, unsigned kind) {
    for (size_t i = from; table != nullptr && i < bytes / sizeof(ElfW(Rela)); ++i) {
      if (ELF64_R_TYPE(table[i].r_info) != kind) continue;
      const char* name = t.names + t.symbols[ELF64_R_SYM(table[i].r_info)].st_name;
      if (!wanted(name)) continue;
      found.push_back({name, reinterpret_cast<void**>(library.base + table[i].r_offset)});
    }
  };
  search(t.jumps, t.jump_bytes, 0, kJumpSlot);
  search(t.others, t.other_bytes, t.relative, kGlobalData);
  return found;
}

bool contains(const Loaded& library, const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  for (int i = 0; i < library.header_count; ++i) {
    const ElfW(Phdr)& part = library.headers[i];
    const uintptr_t begin = library.base + part.p_vaddr;
    if (part.p_type == PT_LOAD && at >= begin && at - begin < part.p_memsz) return true;
  }
  return false;
}

bool write_entry(const Loaded& library, void** entry, void* value) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(entry);
  const bool closed = is_closed(library, address, page);
  void* const begin = reinterpret_cast<void*>(address / page * page);
  if (closed && mprotect(begin, page, PROT_READ | PROT_WRITE) != 0) return false;
  __atomic_store_n(entry, value, __ATOMIC_RELEASE);
  if (closed) mprotect(begin, page, PROT_READ);
  return true;
}

}  // namespace ingot::blas
