#include "cuda/canonical_source.h"

#include <gtest/gtest.h>

namespace ingot::cuda {
namespace {

std::string text_of_layer(const std::string& layer, const std::string& value,
                          const std::string& suffix) {
  return "// fused_linear_add" + suffix + ": a product.\n#include \"product/hopper/packed.cuh\"\n" +
         "struct FusedLinearAdd" + suffix + " {\n  Tensor v" + value + "_net_" + layer +
         "_bias;  // f32 [1, 256]\n};\nextern \"C\" __global__ void fused_linear_add_" + suffix +
         "(const FusedLinearAdd" + suffix + "::Params params) {\n  const float v" + value +
         "9_add = 1.5e-05f * product + v" + value + "_net_" + layer + "_bias;  // net." + layer +
         "\n}\n";
}

CanonicalSource canonical_layer(const std::string& layer, const std::string& value,
                                const std::string& suffix) {
  const std::string name = "fused_linear_add_" + suffix;
  return canonical_source({name, text_of_layer(layer, value, suffix)}, {name});
}

TEST(CanonicalSourceTest, EqualLayersHaveOneText) {
  const CanonicalSource one = canonical_layer("3", "18", "2");
  const CanonicalSource other = canonical_layer("27", "81", "14");
  EXPECT_EQ(one.request.text, other.request.text);
  EXPECT_EQ(one.request.name, "fused_linear_add");
  EXPECT_EQ(one.functions, other.functions);
  EXPECT_EQ(one.functions, std::vector<std::string>{"fused_linear_add"});
  EXPECT_EQ(one.request.text,
            "\n#include \"product/hopper/packed.cuh\"\n"
            "struct FusedLinearAdd {\n  Tensor v0;\n};\n"
            "extern \"C\" __global__ void fused_linear_add(const FusedLinearAdd::Params params) {\n"
            "  const float v1 = 1.5e-05f * product + v0;\n}\n");
}

TEST(CanonicalSourceTest, DifferentComputationsKeepDifferentTexts) {
  const std::vector<std::string> k = {"k"};
  const auto text = [&](const std::string& source) {
    return canonical_source({"k", source}, k).request.text;
  };
  EXPECT_NE(text("v1_a - v2_b"), text("v2_b - v2_b"));
  EXPECT_EQ(text("v1_a - v2_b"), text("v7_b - v3_a"));
  EXPECT_NE(text("v1_a = v1_a - v2_b"), text("v1_a = v2_b - v1_a"));
  EXPECT_NE(text("x * 256u"), text("x * 257u"));
  EXPECT_NE(text("rows<4, 256>"), text("rows<4, 2, 56>"));
  EXPECT_EQ(text("v1_a_stored[i] = v1_a;"), text("v9_a_stored[i] = v9_a;"));
}

TEST(CanonicalSourceTest, NamesThatWouldMeetStayApart) {
  const CanonicalSource two =
      canonical_source({"norm", "void norm_1(); void norm_2(); void norm_unaligned_3();"},
                       {"norm_1", "norm_2", "norm_unaligned_3"});
  EXPECT_EQ(two.functions, (std::vector<std::string>{"norm", "norm_2", "norm_unaligned"}));
  EXPECT_EQ(two.request.text, "void norm(); void norm_2(); void norm_unaligned();");
  const CanonicalSource taken = canonical_source(
      {"norm_1", "void norm_1() { norm(v1_x, v2); vector<v3x>(0x1f); }"}, {"norm_1"});
  EXPECT_EQ(taken.request.text, "void norm_1() { norm(v0, v1); vector<v3x>(0x1f); }");
}

TEST(CanonicalSourceTest, WhatEndsEarlyIsKept) {
  EXPECT_EQ(canonical_source({"k", ""}, {}).request.text, "");
  EXPECT_EQ(canonical_source({"k", "a // b"}, {}).request.text, "a");
  EXPECT_EQ(canonical_source({"k", "\"a // b"}, {}).request.text, "\"a // b");
  EXPECT_EQ(canonical_source({"k", "a / b\n\n"}, {}).request.text, "a / b\n\n");
}

}  // namespace
}  // namespace ingot::cuda
