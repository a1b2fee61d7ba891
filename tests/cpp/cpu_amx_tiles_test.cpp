// The tile instructions' semantics, and who is given them. Where they execute, they are compared
// with their emulation bit by bit.
#include <gtest/gtest.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "amx_testing.h"
#include "cpu/half.h"
#include "cpu/product/amx/probe.h"
#include "cpu/product/amx/product.h"
#include "support/error.h"
#include "support/threads.h"

namespace ingot::cpu::amx {
namespace {

// The tiles' instructions -------------------------------------------------------------------------

// One step with a single row of a and column of b: halves by bits, the rest zero.
float one_dot(const Engine& engine, Scheme scheme, const std::vector<uint16_t>& a,
              const std::vector<uint16_t>& b) {
  alignas(64) static std::byte left[kPanelBytes[1]], right[kPanelBytes[1]];
  alignas(64) static float sums[kPanelRows * kPanelRows];
  std::memset(left, 0, sizeof left);
  std::memset(right, 0, sizeof right);
  for (size_t k = 0; k < a.size(); ++k) {
    std::memcpy(left + 2 * k, &a[k], 2);
    std::memcpy(right + k / 2 * 64 + k % 2 * 2, &b[k], 2);
  }
  Update nothing;
  engine.begin();
  engine.multiply[static_cast<int>(scheme)]({left, right, 1, sums, {}}, &nothing);
  engine.end();
  return sums[0];
}

TEST(CpuAmxTiles, TilesRoundAndFlushAsTheManualSays) {
  const auto bf16 = [](float v) { return float_to_bf16(v); };
  const auto fp16 = [](float v) { return float_to_fp16(v); };
  for (const Engine* engine : engines(Scheme::b6)) {
    SCOPED_TRACE(engine->name);
    // Subnormal operands count as zero, and subnormal results become zero.
    EXPECT_EQ(one_dot(*engine, Scheme::b6, {0x0040}, {bf16(0x1p100f)}), 0.0f);
    EXPECT_EQ(one_dot(*engine, Scheme::b6, {bf16(0x1p-70f)}, {bf16(0x1p-70f)}), 0.0f);
    EXPECT_EQ(one_dot(*engine, Scheme::b6, {bf16(0x1p-60f)}, {bf16(0x1p-66f)}), 0x1p-126f);
    // Even and odd k have sums of their own: 2²⁴ does not swallow the ones beside it.
    EXPECT_EQ(
        one_dot(*engine, Scheme::b6, {bf16(0x1p24f), bf16(1), 0, bf16(1), bf16(-0x1p24f), bf16(1)},
                {bf16(1), bf16(1), 0, bf16(1), bf16(1), bf16(1)}),
        3.0f);
    // Within one of them it does, a tie going to even.
    EXPECT_EQ(one_dot(*engine, Scheme::b6, {bf16(0x1p24f), 0, bf16(1), 0, bf16(-0x1p24f), 0},
                      {bf16(1), 0, bf16(1), 0, bf16(1), 0}),
              0.0f);
  }
  for (const Engine* engine : engines(Scheme::f3)) {
    SCOPED_TRACE(engine->name);
    EXPECT_EQ(one_dot(*engine, Scheme::f3, {0x0001}, {0x0001}), 0x1p-48f);
    EXPECT_EQ(one_dot(*engine, Scheme::f3, {fp16(0x1p15f), 0x0001}, {fp16(1), fp16(0x1p15f)}),
              0x1p15f + 0x1p-9f);
    EXPECT_EQ(one_dot(*engine, Scheme::f3,
                      {fp16(0x1p12f), fp16(1), fp16(1), fp16(1), fp16(-0x1p12f), fp16(1)},
                      {fp16(0x1p12f), fp16(1), fp16(1), fp16(1), fp16(0x1p12f), fp16(1)}),
              3.0f);
  }
}

TEST(CpuAmxTiles, InstructionsEqualTheEmulationOnRandomBits) {
  const Support usable = support(machine());
  if (!usable.bf16) GTEST_SKIP() << "AMX is " << usable.state;
  const Engine& emulated = best_emulated_engine(machine());
  for (const Scheme scheme : {Scheme::b6, Scheme::f3}) {
    if (scheme == Scheme::f3 && !usable.fp16) continue;
    Random random(11);
    std::vector<std::byte> memory(2 * kPanelBytes[1] + 64);
    auto* left = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) &
                                              ~uintptr_t{63});
    std::byte* right = left + kPanelBytes[1];
    alignas(64) static float found[2][kPanelRows * kPanelRows];
    for (int round = 0; round < 200; ++round) {
      for (int i = 0; i < kPanelBytes[1]; ++i) {
        // Finite halves of every magnitude: the exponent's uppermost bit follows the round.
        const int upper = random.integer(0, 255) & (i % 2 == 1 ? (round % 2 ? 0xbf : 0xfb) : 0xff);
        left[i] = static_cast<std::byte>(upper);
        right[i] = static_cast<std::byte>(random.integer(0, 255) & (i % 2 == 1 ? 0xbb : 0xff));
      }
      int side = 0;
      for (const Engine* engine : {&emulated, instruction_engine()}) {
        Update nothing;
        engine->begin();
        engine->multiply[static_cast<int>(scheme)]({left, right, kSteps, found[side++], {}},
                                                   &nothing);
        engine->end();
      }
      for (int i = 0; i < kPanelRows * kPanelRows; ++i) {
        if (std::isnan(found[0][i]) && std::isnan(found[1][i])) continue;
        ASSERT_EQ(0, std::memcmp(&found[0][i], &found[1][i], sizeof(float)))
            << "scheme " << static_cast<int>(scheme) << ", element " << i << ": " << found[0][i]
            << " emulated, " << found[1][i] << " by the instructions";
      }
    }
  }
}

// Dispatch ----------------------------------------------------------------------------------------

TEST(CpuAmxTiles, StatesSayWhatIsMissing) {
  Findings f;
  EXPECT_EQ(judge(f).state, "not on this processor");
  f.tiles = f.bf16 = f.fp16 = true;
  EXPECT_NE(judge(f).state.find("AVX-512"), std::string::npos);
  f.vectors = true;
  EXPECT_NE(judge(f).state.find("kernel does not save"), std::string::npos);
  f.saved = true;
  f.refusal = EPERM;
  EXPECT_NE(judge(f).state.find("refused permission (Operation not permitted)"), std::string::npos);
  EXPECT_FALSE(judge(f).bf16);
  f.refusal = ENOSPC;
  EXPECT_NE(judge(f).state.find("signal stack"), std::string::npos);
  f.refusal = 0;
  EXPECT_NE(judge(f).state.find("do not execute"), std::string::npos);
  EXPECT_FALSE(judge(f).bf16);
  f.bf16_executes = true;
  EXPECT_TRUE(judge(f).bf16);
  EXPECT_FALSE(judge(f).fp16);
  f.fp16_executes = true;
  EXPECT_TRUE(judge(f).fp16);
  EXPECT_EQ(judge(f).state, "usable");
}

TEST(CpuAmxTiles, AMaskedProcessorIsNeverGivenTheInstructions) {
  for (const nlohmann::json& masks :
       {nlohmann::json{{"amx", false}}, nlohmann::json{{"avx512", false}},
        nlohmann::json{{"avx2", false}}}) {
    const Isa isa = detect_isa(masks);
    EXPECT_FALSE(support(isa).bf16);
    EXPECT_FALSE(support(isa).fp16);
    EXPECT_EQ(amx_product(isa, Choice::automatic), nullptr);
    EXPECT_THROW(amx_product(isa, Choice::bf16), Error);
    EXPECT_EQ(&best_emulated_engine(detect_isa({{"avx512", false}})), emulated_engine());
  }
  const Isa no_fp16 = detect_isa({{"amx_fp16", false}});
  EXPECT_FALSE(support(no_fp16).fp16);
  if (support(machine()).bf16) {
    EXPECT_EQ(amx_product(no_fp16, Choice::bf16)->name(), "ingot AMX product (bf16)");
  }
}

TEST(CpuAmxTiles, ChoicesAreReadAndMistakesNamed) {
  EXPECT_EQ(parse_choice(""), Choice::automatic);
  EXPECT_EQ(parse_choice("auto"), Choice::automatic);
  EXPECT_EQ(parse_choice("no-amx"), Choice::none);
  EXPECT_EQ(parse_choice("amx-fp16"), Choice::fp16);
  EXPECT_EQ(parse_choice("amx-bf16"), Choice::bf16);
  EXPECT_EQ(parse_choice("amx-fp16-emulated"), Choice::fp16_emulated);
  EXPECT_EQ(parse_choice("amx-bf16-emulated"), Choice::bf16_emulated);
  EXPECT_THROW(parse_choice("amx"), Error);
  EXPECT_EQ(amx_product(machine(), Choice::none), nullptr);
  EXPECT_EQ(amx_product(machine(), Choice::automatic) != nullptr, support(machine()).bf16);
  EXPECT_NE(amx_product(machine(), Choice::fp16_emulated), nullptr);
}

TEST(CpuAmxTiles, SmallAndShortProductsAreLeftToTheLibrary) {
  const Product f3("f3", *emulated_engine(), Scheme::f3, machine(), false);
  const Product b6("b6", *emulated_engine(), Scheme::b6, machine(), false);
  const auto takes = [](const Product& p, int64_t m, int64_t n, int64_t k) {
    ProductCall call;
    call.m = m;
    call.n = n;
    call.k = k;
    return p.takes(call);
  };
  set_host_threads(nullptr, 2);
  EXPECT_TRUE(takes(f3, 1024, 8192, 8192));
  EXPECT_TRUE(takes(b6, 1024, 8192, 8192));
  EXPECT_TRUE(takes(f3, 128, 4096, 4096));
  EXPECT_FALSE(takes(f3, 1, 8192, 8192));
  EXPECT_FALSE(takes(f3, 64, 64, 64));
  EXPECT_FALSE(takes(b6, 64, 4096, 4096));
  EXPECT_FALSE(takes(b6, 256, 256, 256));
  ProductCall half;
  half.m = half.n = half.k = 1024;
  half.dtype = INGOT_BF16;
  EXPECT_FALSE(f3.takes(half));
  set_host_threads(nullptr, 0);
}

#if defined(__x86_64__) && defined(__linux__)
TEST(CpuAmxTiles, AnIllegalInstructionEndsTheProbeAlone) {
  EXPECT_FALSE(survives([] { asm volatile("ud2"); }));
  EXPECT_TRUE(survives([] {}));
}
#endif

}  // namespace
}  // namespace ingot::cpu::amx
