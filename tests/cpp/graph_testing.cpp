#include "graph_testing.h"

#include <cmath>
#include <limits>

namespace ingot::testing {
namespace {

class RandomGraph {
 public:
  explicit RandomGraph(uint64_t seed) : random_(seed) {}

  Graph run() {
    const Shape shapes[] = {{true, 1, 1, 12}, {true, 3, 1, 4}, {true, 1, 3, 4}, {true, 2, 1, 6}};
    add_leaf(LeafRole::input, shapes[below(4)]);
    if (below(3) == 0) add_leaf(LeafRole::input, shapes[below(4)]);
    const int steps = 3 + static_cast<int>(below(14));
    for (int i = 0; i < steps; ++i) step();
    add_results();
    return builder_.take();
  }

 private:
  size_t below(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random_); }
  const Node& node(ValueId id) const { return builder_.graph()[id]; }

  ValueId add_leaf(LeafRole role, Shape shape) {
    const std::string name = "leaf" + std::to_string(values_.size());
    return keep(builder_.leaf(role, name, DType::f32, shape));
  }
  ValueId keep(ValueId id) {
    values_.push_back(id);
    return id;
  }
  // Mostly recent values, so that chains grow.
  ValueId pick() {
    const size_t back = std::min(values_.size(), below(2) == 0 ? size_t{2} : values_.size());
    return values_[values_.size() - 1 - below(back)];
  }

  void step() {
    switch (below(11)) {
      case 0:
        return linear();
      case 1:
      case 2:
        return unary();
      case 3:
      case 4:
        return with_parameter();
      case 5:
      case 6:
        return binary();
      case 7:
        return reduce();
      case 8:
        return view();
      case 9:
        return scan();
      default:
        return normalise();
    }
  }

  void linear() {
    const ValueId a = pick();
    if (node(a).shape.groups != 1 || node(a).dtype != DType::f32) return unary();
    constexpr int64_t kWidths[] = {12, 4, 6, 1};
    const int64_t width = kWidths[below(4)];
    const bool transpose = below(2) == 0;
    const int64_t inner = node(a).shape.features;
    const ValueId b = add_leaf(LeafRole::parameter, transpose ? Shape{false, width, 1, inner}
                                                              : Shape{false, inner, 1, width});
    values_.pop_back();
    keep(builder_.matmul(a, b, transpose));
  }

  void unary() {
    constexpr PointwiseOp kOps[] = {PointwiseOp::relu_, PointwiseOp::tanh_, PointwiseOp::sigmoid_,
                                    PointwiseOp::neg_, PointwiseOp::abs_};
    keep(builder_.pointwise(kOps[below(5)], {as_float(pick())}));
  }

  ValueId as_float(ValueId id) {
    return is_floating(node(id).dtype) ? id : builder_.cast(id, DType::f32);
  }

  PointwiseOp binary_op() {
    constexpr PointwiseOp kOps[] = {PointwiseOp::add_, PointwiseOp::sub_, PointwiseOp::mul_,
                                    PointwiseOp::maximum_};
    return kOps[below(4)];
  }

  // An operand per feature, per group, per row, scalar, constant or full.
  void with_parameter() {
    const ValueId a = as_float(pick());
    Shape shape = node(a).shape;
    shape.batched = false;
    if (below(3) == 0) shape.rows = 1;
    if (below(3) == 0) shape.groups = 1;
    if (below(3) == 0) shape.features = 1;
    const bool constant = below(4) == 0;
    const LeafRole role = below(3) == 0 ? LeafRole::buffer : LeafRole::parameter;
    const ValueId b = constant ? builder_.constant(0.5) : add_leaf(role, shape);
    if (!constant && below(4) != 0) values_.pop_back();
    keep(below(2) == 0 ? builder_.pointwise(binary_op(), {a, b})
                       : builder_.pointwise(binary_op(), {b, a}));
  }

  bool broadcasts(const Shape& a, const Shape& b) const {
    const auto fits = [](int64_t x, int64_t y) { return x == y || x == 1 || y == 1; };
    return fits(a.rows, b.rows) && fits(a.groups, b.groups) && fits(a.features, b.features);
  }

  void binary() {
    const ValueId a = as_float(pick());
    for (int attempt = 0; attempt < 8; ++attempt) {
      const ValueId b = as_float(values_[below(values_.size())]);
      if (!broadcasts(node(a).shape, node(b).shape)) continue;
      keep(builder_.pointwise(binary_op(), {a, b}));
      return;
    }
  }

  AxisMask axes() {
    constexpr AxisMask kMasks[] = {8, 8, 4, 12, 1, 1, 9, 3, 15, 2, 10, 14};
    return kMasks[below(12)];
  }

  void reduce() {
    constexpr Finish kFinishes[] = {Finish::sum,   Finish::max,      Finish::min,
                                    Finish::mean,  Finish::variance, Finish::log_sum_exp,
                                    Finish::argmax};
    const Finish finish = kFinishes[below(7)];
    keep(builder_.reduce(finish, as_float(pick()), axes()));
  }

  void scan() { keep(builder_.scan(as_float(pick()))); }

  void view() {
    const ValueId a = pick();
    const Shape shape = node(a).shape;
    const int64_t total = shape.static_elements();
    std::vector<Shape> choices = {{shape.batched, 1, 1, total}, {shape.batched, total, 1, 1}};
    for (const int64_t inner : {2, 3, 4, 6}) {
      if (total % inner != 0) continue;
      choices.push_back({shape.batched, 1, total / inner, inner});
      choices.push_back({shape.batched, total / inner, 1, inner});
      if (total % (2 * inner) == 0) {
        choices.push_back({shape.batched, total / inner / 2, 2, inner});
      }
    }
    keep(builder_.view(a, choices[below(choices.size())]));
  }

  // (x − mean)·rsqrt(var + ε), with an update of a running mean where the shape allows.
  void normalise() {
    const ValueId a = as_float(pick());
    const AxisMask mask = axes();
    const ValueId mean = builder_.reduce(Finish::mean, a, mask);
    const ValueId variance = builder_.reduce(Finish::variance, a, mask);
    const ValueId shifted =
        builder_.pointwise(PointwiseOp::add_, {variance, builder_.constant(0.1)});
    const ValueId scale = builder_.pointwise(PointwiseOp::rsqrt_, {shifted});
    const ValueId centred = builder_.pointwise(PointwiseOp::sub_, {a, mean});
    const Shape shape = node(mean).shape;
    if (!shape.batched && below(2) == 0) {
      const ValueId buffer =
          builder_.leaf(LeafRole::buffer, "running" + std::to_string(values_.size()), DType::f32,
                        below(3) == 0 ? Shape{false, 1, 1, shape.static_elements()} : shape);
      const ValueId seen = builder_.view(mean, node(buffer).shape);
      builder_.update(builder_.pointwise(PointwiseOp::add_, {buffer, seen}), buffer);
      if (below(3) == 0) values_.push_back(buffer);
    }
    keep(builder_.pointwise(PointwiseOp::mul_, {centred, scale}));
  }

  void add_results() {
    builder_.result(values_.back(), "last");
    const size_t more = below(3);
    for (size_t i = 0; i < more; ++i) builder_.result(pick(), "result" + std::to_string(i));
    if (below(3) != 0) return;
    // A counter, and sometimes a reader of it.
    const ValueId count = builder_.leaf(LeafRole::buffer, "count", DType::i64, {});
    const ValueId next =
        builder_.pointwise(PointwiseOp::add_, {count, builder_.constant(1, DType::i64)});
    builder_.update(next, count);
    if (below(2) == 0) {
      const ValueId factor = builder_.cast(below(2) == 0 ? next : count, DType::f32);
      builder_.result(builder_.pointwise(PointwiseOp::mul_, {factor, as_float(pick())}), "scaled");
    }
  }

  std::mt19937_64 random_;
  GraphBuilder builder_;
  std::vector<ValueId> values_;
};

}  // namespace

Bindings::Bindings(const Graph& graph, int64_t batch, uint64_t seed, bool strided) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform(-1, 1);
  const auto add = [&](const Node& node, bool leaf) {
    const Shape& shape = node.shape;
    const int64_t gap = strided ? 2 : 1;
    const int64_t f = gap, g = shape.features * f + (strided ? 1 : 0), r = shape.groups * g,
                  b = shape.rows * r + (strided ? 3 : 0);
    const int64_t size = shape.extent(kBatch, batch) * b + 1;
    std::vector<double> data(static_cast<size_t>(size), std::numeric_limits<double>::quiet_NaN());
    for (double& value : data) {
      if (!leaf) break;
      value = uniform(random);
      if (node.dtype == DType::i64) value = std::floor(4 * value);
      if (node.dtype == DType::boolean) value = value > 0;
    }
    data_.push_back(std::move(data));
    tensors_.push_back({data_.back().data(),
                        {shape.extent(kBatch, batch), shape.rows, shape.groups, shape.features},
                        {b, r, g, f},
                        INGOT_F64,
                        -1});
  };
  const std::vector<ValueId> leaves = graph.leaves();
  data_.reserve(leaves.size() + graph.results.size());
  for (const ValueId leaf : leaves) add(graph[leaf], true);
  for (const Result& result : graph.results) add(graph[result.value], false);
}

::testing::AssertionResult agree(const Bindings& a, const Bindings& b, double tolerance) {
  for (size_t i = 0; i < a.data().size(); ++i) {
    for (size_t j = 0; j < a.data()[i].size(); ++j) {
      const double x = a.data()[i][j], y = b.data()[i][j];
      if (x == y || (std::isnan(x) && std::isnan(y))) continue;
      const double scale = std::max({1.0, std::abs(x), std::abs(y)});
      if (std::abs(x - y) <= tolerance * scale) continue;
      return ::testing::AssertionFailure()
             << "tensor " << i << ", element " << j << ": " << x << " and " << y;
    }
  }
  return ::testing::AssertionSuccess();
}

Graph random_graph(uint64_t seed) {
  return RandomGraph(seed).run();
}

}  // namespace ingot::testing
