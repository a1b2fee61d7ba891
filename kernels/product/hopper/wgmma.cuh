// wgmma.mma_async: D[64][kN] (fp32) += A[64][16] · B[16][kN] (fp16 or bf16), one warpgroup; of e4m3
// 32 of k at a time, the same 32 bytes of a row. The tensor core then keeps some 14 bits of D, all
// of it: sums of e4m3 come first, while they are small.
//
// A comes from registers (`rs`: four fp16 pairs a thread) or from shared memory (`ss`), B from
// shared memory. Shared operands are K-major in 128-byte rows under the 128-byte swizzle, groups of
// eight rows 1024 bytes apart; a k16 step inside the row adds 2 to the descriptor (16-byte units).
// Accumulator d[4j + 2h + e] of a thread is row 16·warp + lane/4 + 8h, column 8j + 2·(lane%4) + e.
//
// The operand lists are spelled out because inline assembly takes literal text only.
#pragma once

#include "common/ptx.cuh"
#include "common/scalar.cuh"

namespace ingot {

INGOT_D u64 shared_matrix_descriptor(u32 address) {
  constexpr u64 kRowGroupStride = 1024 >> 4;
  constexpr u64 kSwizzle128Bytes = u64(1) << 62;
  return u64((address & 0x3ffff) >> 4) | u64(1) << 16 | kRowGroupStride << 32 | kSwizzle128Bytes;
}

struct e4m3;

template <int kN, class Element = f16>
struct Wgmma;

// clang-format off
#define INGOT_ACC8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define INGOT_ACC32(i) INGOT_ACC8(i), INGOT_ACC8(i + 8), INGOT_ACC8(i + 16), INGOT_ACC8(i + 24)
#define INGOT_REGS_0 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define INGOT_REGS_32 \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define INGOT_REGS_64_TO_79 \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define INGOT_REGS_64 INGOT_REGS_64_TO_79 "," \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define INGOT_REGS_96 \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define INGOT_DEFINE_WGMMA(n, element, regs, accs, p0, p1, p2, p3, p4, p5)                         \
  template <>                                                                                      \
  struct Wgmma<n, element> {                                                                       \
    INGOT_D static void rs(float (&d)[n / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" p5 ", 0;\n"                               \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #element "." #element         \
                   " {" regs "}, {%" p0 ",%" p1 ",%" p2 ",%" p3 "}, %" p4 ", p, 1, 1, 0;\n}\n"     \
                   : accs : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));                 \
    }                                                                                              \
    INGOT_D static void ss(float (&d)[n / 2], u64 a, u64 b, int add) {                             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" p2 ", 0;\n"                               \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #element "." #element         \
                   " {" regs "}, %" p0 ", %" p1 ", p, 1, 1, 0, 0;\n}\n"                           \
                   : accs : "l"(a), "l"(b), "r"(add));                                             \
    }                                                                                              \
  };

#define INGOT_DEFINE_WGMMA_E4M3(n, regs, accs, p0, p1, p2)                                         \
  template <>                                                                                      \
  struct Wgmma<n, e4m3> {                                                                          \
    INGOT_D static void ss(float (&d)[n / 2], u64 a, u64 b, int add) {                             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" p2 ", 0;\n"                               \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3"                      \
                   " {" regs "}, %" p0 ", %" p1 ", p, 1, 1;\n}\n"                                 \
                   : accs : "l"(a), "l"(b), "r"(add));                                             \
    }                                                                                              \
  };

#define INGOT_REGS_N64 INGOT_REGS_0
#define INGOT_ACCS_N64 INGOT_ACC32(0)
INGOT_DEFINE_WGMMA(64, f16, INGOT_REGS_N64, INGOT_ACCS_N64, "32", "33", "34", "35", "36", "37")
#define INGOT_REGS_N128 INGOT_REGS_0 "," INGOT_REGS_32
#define INGOT_ACCS_N128 INGOT_ACC32(0), INGOT_ACC32(32)
INGOT_DEFINE_WGMMA(128, f16, INGOT_REGS_N128, INGOT_ACCS_N128, "64", "65", "66", "67", "68", "69")
INGOT_DEFINE_WGMMA(128, bf16, INGOT_REGS_N128, INGOT_ACCS_N128, "64", "65", "66", "67", "68", "69")
INGOT_DEFINE_WGMMA_E4M3(128, INGOT_REGS_N128, INGOT_ACCS_N128, "64", "65", "66")
#define INGOT_REGS_N160 INGOT_REGS_0 "," INGOT_REGS_32 "," INGOT_REGS_64_TO_79
#define INGOT_ACCS_N160 INGOT_ACC32(0), INGOT_ACC32(32), INGOT_ACC8(64), INGOT_ACC8(72)
INGOT_DEFINE_WGMMA(160, f16, INGOT_REGS_N160, INGOT_ACCS_N160, "80", "81", "82", "83", "84", "85")
#define INGOT_REGS_N192 INGOT_REGS_0 "," INGOT_REGS_32 "," INGOT_REGS_64
#define INGOT_ACCS_N192 INGOT_ACC32(0), INGOT_ACC32(32), INGOT_ACC32(64)
INGOT_DEFINE_WGMMA(192, f16, INGOT_REGS_N192, INGOT_ACCS_N192, "96", "97", "98", "99", "100", "101")
INGOT_DEFINE_WGMMA_E4M3(192, INGOT_REGS_N192, INGOT_ACCS_N192, "96", "97", "98")
#define INGOT_REGS_N256 INGOT_REGS_0 "," INGOT_REGS_32 "," INGOT_REGS_64 "," INGOT_REGS_96
#define INGOT_ACCS_N256 INGOT_ACC32(0), INGOT_ACC32(32), INGOT_ACC32(64), INGOT_ACC32(96)
INGOT_DEFINE_WGMMA(256, f16, INGOT_REGS_N256, INGOT_ACCS_N256, "128", "129", "130", "131", "132", "133")
INGOT_DEFINE_WGMMA(256, bf16, INGOT_REGS_N256, INGOT_ACCS_N256, "128", "129", "130", "131", "132", "133")
INGOT_DEFINE_WGMMA_E4M3(256, INGOT_REGS_N256, INGOT_ACCS_N256, "128", "129", "130")

#undef INGOT_DEFINE_WGMMA
#undef INGOT_DEFINE_WGMMA_E4M3
#undef INGOT_REGS_N64
#undef INGOT_ACCS_N64
#undef INGOT_REGS_N128
#undef INGOT_ACCS_N128
#undef INGOT_REGS_N160
#undef INGOT_ACCS_N160
#undef INGOT_REGS_N192
#undef INGOT_ACCS_N192
#undef INGOT_REGS_N256
#undef INGOT_ACCS_N256
#undef INGOT_REGS_0
#undef INGOT_REGS_32
#undef INGOT_REGS_64
#undef INGOT_REGS_64_TO_79
#undef INGOT_REGS_96
#undef INGOT_ACC32
#undef INGOT_ACC8
// clang-format on

}  // namespace ingot
