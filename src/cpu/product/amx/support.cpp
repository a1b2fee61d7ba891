#include "cpu/product/amx/support.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "cpu/product/amx/probe.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ingot::cpu::amx {
namespace {

#if defined(__x86_64__) && defined(__linux__)
bool has_bf16_vectors(const Isa& isa) {
  __builtin_cpu_init();
  return isa.level == Level::avx512 && __builtin_cpu_supports("avx512bf16");
}

bool kernel_saves_tiles() {
  if (!__builtin_cpu_supports("avx512f")) return false;  // then XGETBV might not exist either
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTiles = 3u << 17;
  return (low & kTiles) == kTiles;
}

int request_permission() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0 ? 0 : errno;
}

Findings find(const Isa& isa) {
  Findings f;
  f.tiles = isa.amx_tile;
  f.bf16 = isa.amx_bf16;
  f.fp16 = isa.amx_fp16;
  f.vectors = has_bf16_vectors(isa);
  if (!f.tiles || !f.bf16 || !f.vectors) return f;
  f.saved = kernel_saves_tiles();
  if (!f.saved) return f;
  f.refusal = request_permission();
  if (f.refusal != 0) return f;
  f.bf16_executes = executes(Scheme::b6);
  f.fp16_executes = f.fp16 && f.bf16_executes && executes(Scheme::f3);
  return f;
}
#else
bool has_bf16_vectors(const Isa&) {
  return false;
}

Findings find(const Isa&) {
  return {};
}
#endif

}  // namespace

Support judge(const Findings& f) {
  Support s;
  if (!f.tiles || !f.bf16) {
    s.state = "not on this processor";
  } else if (!f.vectors) {
    s.state = "not used: AVX-512 with bf16 conversions is missing or masked";
  } else if (!f.saved) {
    s.state = "not usable: the kernel does not save tile registers (Linux 5.16 or later does)";
  } else if (f.refusal != 0) {
    // Tile registers must fit on every alternate signal stack that a thread has set up.
    s.state = fmt::format("not usable: the kernel refused permission ({})",
                          f.refusal == ENOSPC ? "a thread's alternate signal stack is too small"
                                              : std::strerror(f.refusal));
  } else if (!f.bf16_executes) {
    s.state = "not usable: permission was granted, but the instructions do not execute";
  } else {
    s.bf16 = true;
    s.fp16 = f.fp16_executes;
    s.state =
        f.fp16 && !s.fp16 ? "usable, bf16 only: the fp16 instruction does not execute" : "usable";
  }
  return s;
}

Support support(const Isa& isa) {
  if (!isa.amx_tile || !isa.amx_bf16) return judge({});
  static const Support* const found =
      new Support(judge(find(detect_isa(nlohmann::json::object()))));
  Support s = *found;
  s.fp16 = s.fp16 && isa.amx_fp16;
  s.bf16 = s.bf16 && isa.level == Level::avx512;
  s.fp16 = s.fp16 && s.bf16;
  return s;
}

const Engine& best_emulated_engine(const Isa& isa) {
  return has_bf16_vectors(isa) && emulated_avx512_engine() != nullptr ? *emulated_avx512_engine()
                                                                      : *emulated_engine();
}

}  // namespace ingot::cpu::amx
