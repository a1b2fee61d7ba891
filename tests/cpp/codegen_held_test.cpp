// What kernels that work on rows hold of each element from one function to another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cctype>
#include <optional>
#include <set>
#include <string>

#include "codegen/kernel_source.h"
#include "codegen_testing.h"

namespace ingot {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Members of `held` that the text reads before it assigns them.
std::set<std::string> read_before_assigned(const std::string& text) {
  const std::string held = "held.";
  std::set<std::string> assigned, wrong;
  for (size_t at = text.find(held); at != std::string::npos; at = text.find(held, at + 1)) {
    const size_t begin = at + held.size();
    size_t end = begin;
    while (std::isalnum(static_cast<unsigned char>(text[end])) || text[end] == '_') ++end;
    const std::string name = text.substr(begin, end - begin);
    if (text.compare(end, 3, "[i]") == 0) end += 3;
    if (text.compare(end, 3, " = ") == 0) {
      assigned.insert(name);
    } else if (!assigned.contains(name)) {
      wrong.insert(name);
    }
  }
  return wrong;
}

// GELU's derivative of x, times a square of x that it has in common with what is beside it.
ValueId density_and_square(GraphBuilder& builder, ValueId x) {
  const auto times = [&](ValueId a, ValueId b) {
    return builder.pointwise(PointwiseOp::mul_, {a, b});
  };
  const ValueId square = times(x, x);
  const ValueId density =
      builder.pointwise(PointwiseOp::exp_, {times(square, builder.constant(-0.5))});
  const ValueId erf =
      builder.pointwise(PointwiseOp::erf_, {times(x, builder.constant(0.70710678118654752440))});
  const ValueId sum = builder.pointwise(PointwiseOp::add_, {times(x, density), erf});
  const ValueId rest = builder.pointwise(PointwiseOp::sub_, {builder.constant(1), square});
  return times(sum, rest);
}

TEST(CodegenHeld, AFunctionComputesWhatItsCompositionsSkip) {
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, 768});
  const ValueId y = density_and_square(builder, x);
  const ValueId sum = builder.reduce(Finish::sum, y, axis_bit(kFeatures));
  const KernelSource source = source_of(builder, builder.pointwise(PointwiseOp::div_, {y, sum}));
  EXPECT_THAT(source.text, HasSubstr("math::exp_of_minus_square("));
  EXPECT_THAT(source.text, HasSubstr("held."));
  EXPECT_THAT(read_before_assigned(source.text), IsEmpty());
}

TEST(CodegenHeld, RowsThatArePackedHoldNothingThatNoFunctionComputes) {
  GraphBuilder builder;
  const ValueId x = builder.leaf(LeafRole::input, "x", DType::f32, {true, 1, 1, 768});
  const ValueId w = builder.leaf(LeafRole::parameter, "w", DType::f32, {false, 512, 1, 768});
  const ValueId y = density_and_square(builder, x);
  builder.result(builder.matmul(y, w, true), "z");
  const Plan plan = make_plan(builder.take(), hopper_target(), Precision::fp32);
  const std::optional<KernelSource> source = generate_packing(
      plan, 0, product_operand(plan.graph, plan.sweeps.at(1), 0), hopper::Scheme::split);
  ASSERT_TRUE(source);
  EXPECT_THAT(source->text, HasSubstr("math::exp_of_minus_square("));
  EXPECT_THAT(read_before_assigned(source->text), IsEmpty());
}

}  // namespace
}  // namespace ingot
