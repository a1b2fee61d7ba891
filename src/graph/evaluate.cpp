#include "graph/evaluate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <thread>
#include <vector>

#include "graph/limits.h"
#include "support/element.h"
#include "support/error.h"

namespace ingot {

double apply_pointwise(PointwiseOp op, DType dtype, const std::array<double, 3>& x) {
  switch (op) {
#define INGOT_APPLY_1(name) pointwise::name(x[0])
#define INGOT_APPLY_2(name) pointwise::name(x[0], x[1])
#define INGOT_APPLY_3(name) pointwise::name(x[0], x[1], x[2])
#define INGOT_APPLY(name, arity, ...) \
  case PointwiseOp::name##_:          \
    return INGOT_APPLY_##arity(name);
    INGOT_POINTWISE_OPERATORS(INGOT_APPLY)
#undef INGOT_APPLY
#undef INGOT_APPLY_3
#undef INGOT_APPLY_2
#undef INGOT_APPLY_1
    case PointwiseOp::cast_:
      if (dtype == DType::boolean) return x[0] != 0 ? 1 : 0;
      return dtype == DType::i64 ? std::trunc(x[0]) : x[0];
  }
  return 0;
}

namespace {

using Values = std::vector<double>;
using Index = std::array<int64_t, kAxes>;

Index extents_of(const Shape& shape, int64_t batch) {
  return {shape.extent(kBatch, batch), shape.rows, shape.groups, shape.features};
}

// Strides, in elements, of a contiguous value; 0 along extents of 1, so that they broadcast.
Index strides_of(const Shape& shape, int64_t batch) {
  const Index extents = extents_of(shape, batch);
  Index strides{};
  int64_t stride = 1;
  for (size_t axis = kAxes; axis-- > 0;) {
    strides[axis] = extents[axis] == 1 ? 0 : stride;
    stride *= extents[axis];
  }
  return strides;
}

int64_t offset(const Index& at, const Index& strides) {
  return at[0] * strides[0] + at[1] * strides[1] + at[2] * strides[2] + at[3] * strides[3];
}

// Calls visit(index) for every element, the last axis fastest.
template <class Visit>
void for_each_index(const Index& extents, Visit visit) {
  Index at{};
  for (at[0] = 0; at[0] < extents[0]; ++at[0]) {
    for (at[1] = 0; at[1] < extents[1]; ++at[1]) {
      for (at[2] = 0; at[2] < extents[2]; ++at[2]) {
        for (at[3] = 0; at[3] < extents[3]; ++at[3]) visit(at);
      }
    }
  }
}

void check_tensor(const ingot_tensor& tensor, const Shape& shape, int64_t batch,
                  std::string_view what, std::string_view name) {
  const Index extents = extents_of(shape, batch);
  if (!std::equal(extents.begin(), extents.end(), tensor.sizes)) {
    fail(INGOT_INVALID_ARGUMENT, "{} '{}' has sizes [{}], expected [{}]", what, name,
         fmt::join(tensor.sizes, tensor.sizes + kAxes, ", "), fmt::join(extents, ", "));
  }
  if (element_size(tensor.dtype) == 0) {
    fail(INGOT_INVALID_ARGUMENT, "{} '{}' has the unknown dtype {}", what, name, tensor.dtype);
  }
  if (tensor.device != -1) {
    fail(INGOT_INVALID_ARGUMENT, "{} '{}' is not in host memory", what, name);
  }
  if (tensor.data == nullptr && shape.elements(batch) != 0) {
    fail(INGOT_INVALID_ARGUMENT, "{} '{}' has no data", what, name);
  }
}

Index strides_of(const ingot_tensor& tensor) {
  return {tensor.strides[0], tensor.strides[1], tensor.strides[2], tensor.strides[3]};
}

Values load(const ingot_tensor& tensor) {
  const Index extents = {tensor.sizes[0], tensor.sizes[1], tensor.sizes[2], tensor.sizes[3]};
  const Index strides = strides_of(tensor);
  Values values;
  values.reserve(static_cast<size_t>(extents[0] * extents[1] * extents[2] * extents[3]));
  for_each_index(extents, [&](const Index& at) {
    values.push_back(load_element(tensor.data, tensor.dtype, offset(at, strides)));
  });
  return values;
}

void store(const ingot_tensor& tensor, const Values& values) {
  const Index extents = {tensor.sizes[0], tensor.sizes[1], tensor.sizes[2], tensor.sizes[3]};
  const Index strides = strides_of(tensor);
  size_t next = 0;
  for_each_index(extents, [&](const Index& at) {
    store_element(tensor.data, tensor.dtype, offset(at, strides), values[next++]);
  });
}

// Sums run in extended precision, so that their own rounding stays below the doubles'.
long double sum_of(const Values& x) {
  long double sum = 0;
  for (const double value : x) sum += value;
  return sum;
}

double mean_of(const Values& x) {
  return static_cast<double>(sum_of(x) / static_cast<long double>(x.size()));
}

// Two passes: the mean first, then Σ (x − mean)².
double variance_of(const Values& x, double correction) {
  const long double mean = sum_of(x) / static_cast<long double>(x.size());
  long double squares = 0;
  for (const double value : x) squares += (value - mean) * (value - mean);
  return static_cast<double>(squares / (static_cast<long double>(x.size()) - correction));
}

double max_of(const Values& x) {
  double top = -std::numeric_limits<double>::infinity();
  for (const double value : x) top = pointwise::maximum(top, value);
  return top;
}

double min_of(const Values& x) {
  double least = std::numeric_limits<double>::infinity();
  for (const double value : x) least = pointwise::minimum(least, value);
  return least;
}

// The first of the largest; a NaN counts as larger than any number.
double argmax_of(const Values& x) {
  size_t best = 0;
  for (size_t i = 1; i < x.size(); ++i) {
    if (std::isnan(x[best])) break;
    if (std::isnan(x[i]) || x[i] > x[best]) best = i;
  }
  return static_cast<double>(best);
}

double sum_exp_of(const Values& x, double top) {
  long double sum = 0;
  for (const double value : x) sum += std::exp(value - top);
  return static_cast<double>(sum);
}

double log_sum_exp_of(const Values& x) {
  const double top = max_of(x);
  if (!std::isfinite(top)) return top;  // Inf, −Inf (all are) and NaN are their own answers
  return top + std::log(sum_exp_of(x, top));
}

double finish_of(Finish finish, const Values& x) {
  switch (finish) {
    case Finish::sum:
      return static_cast<double>(sum_of(x));
    case Finish::max:
    case Finish::max_exponent:
      return max_of(x);
    case Finish::min:
      return min_of(x);
    case Finish::argmax:
      return argmax_of(x);
    case Finish::mean:
      return mean_of(x);
    case Finish::variance:
      return variance_of(x, 0);
    case Finish::variance_unbiased:
      return variance_of(x, 1);
    case Finish::sum_exp:
      return sum_exp_of(x, max_of(x));
    case Finish::log_sum_exp:
      return log_sum_exp_of(x);
  }
  return 0;
}

// c[m, n] += Σ_k a[m, k] · b[k, n] for rows [first, last): 16 rows at a time over strips of
// columns, so that a strip of c stays in cache. Every product is formed: 0 · Inf must give NaN.
void multiply_rows(const double* a, const double* b, double* c, int64_t first, int64_t last,
                   int64_t n, int64_t k) {
  constexpr int64_t kRowBlock = 16, kStrip = 256;
  for (int64_t row = first; row < last; row += kRowBlock) {
    const int64_t row_end = std::min(last, row + kRowBlock);
    for (int64_t column = 0; column < n; column += kStrip) {
      const int64_t column_end = std::min(n, column + kStrip);
      for (int64_t inner = 0; inner < k; ++inner) {
        const double* b_row = b + inner * n;
        for (int64_t i = row; i < row_end; ++i) {
          const double factor = a[i * k + inner];
          for (int64_t j = column; j < column_end; ++j) c[i * n + j] += factor * b_row[j];
        }
      }
    }
  }
}

void multiply(const double* a, const double* b, double* c, int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kWorthAThread = int64_t{1} << 24;
  const int64_t available = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, 16);
  const int64_t threads = m * n * k < kWorthAThread ? 1 : std::min(available, m);
  const int64_t share = (m + threads - 1) / std::max<int64_t>(threads, 1);
  std::vector<std::jthread> pool;
  for (int64_t first = share; first < m; first += share) {
    pool.emplace_back(multiply_rows, a, b, c, first, std::min(m, first + share), n, k);
  }
  multiply_rows(a, b, c, 0, std::min(m, share), n, k);
}

Values transposed(const double* values, int64_t rows, int64_t columns) {
  Values result(static_cast<size_t>(rows * columns));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      result[static_cast<size_t>(j * rows + i)] = values[i * columns + j];
    }
  }
  return result;
}

class Evaluator {
 public:
  Evaluator(const Graph& graph, int64_t batch, std::span<const ingot_tensor> tensors)
      : graph_(graph), batch_(batch), tensors_(tensors), values_(graph.nodes.size()) {}

  void run();

 private:
  void check_tensors() const;
  void find_last_uses();
  Values evaluate_node(const Node& node, const ingot_tensor*& next_leaf) const;
  Values pointwise(const Node& node) const;
  Values reduce(const Node& node) const;
  Values scan(const Node& node) const;
  Values matmul(const Node& node) const;
  const Values& of(ValueId id) const { return values_[static_cast<size_t>(id)]; }

  const Graph& graph_;
  int64_t batch_;
  std::span<const ingot_tensor> tensors_;
  std::vector<Values> values_;
  std::vector<size_t> last_use_;  // node after which a value is not read again
};

void Evaluator::check_tensors() const {
  const std::vector<ValueId> leaves = graph_.leaves();
  check_batch(graph_, batch_);
  if (tensors_.size() != leaves.size() + graph_.results.size()) {
    fail(INGOT_INVALID_ARGUMENT, "graph '{}' takes {} leaves and {} results, got {} tensors",
         graph_.name, leaves.size(), graph_.results.size(), tensors_.size());
  }
  for (size_t i = 0; i < leaves.size(); ++i) {
    const Node& leaf = graph_[leaves[i]];
    check_tensor(tensors_[i], leaf.shape, batch_, "leaf", leaf.name);
  }
  for (size_t i = 0; i < graph_.results.size(); ++i) {
    const Result& result = graph_.results[i];
    const ingot_tensor& tensor = tensors_[leaves.size() + i];
    check_tensor(tensor, graph_[result.value].shape, batch_, "result", result.name);
    if (tensor.dtype != INGOT_F64) {
      fail(INGOT_INVALID_ARGUMENT, "result '{}' must be f64 in an fp64 evaluation", result.name);
    }
  }
}

void Evaluator::find_last_uses() {
  last_use_.assign(graph_.nodes.size(), 0);
  for (size_t id = 0; id < graph_.nodes.size(); ++id) {
    last_use_[id] = id;
    for (const ValueId arg : graph_.nodes[id].args) last_use_[static_cast<size_t>(arg)] = id;
  }
  for (const Result& result : graph_.results) {
    last_use_[static_cast<size_t>(result.value)] = graph_.nodes.size();
  }
  for (const Update& update : graph_.updates) {
    last_use_[static_cast<size_t>(update.value)] = graph_.nodes.size();
  }
}

Values Evaluator::pointwise(const Node& node) const {
  std::array<const double*, 3> data{};
  std::array<Index, 3> strides{};
  for (size_t i = 0; i < node.args.size(); ++i) {
    data[i] = of(node.args[i]).data();
    strides[i] = strides_of(graph_[node.args[i]].shape, batch_);
  }
  Values values;
  values.reserve(static_cast<size_t>(node.shape.elements(batch_)));
  for_each_index(extents_of(node.shape, batch_), [&](const Index& at) {
    std::array<double, 3> x{};
    for (size_t i = 0; i < node.args.size(); ++i) x[i] = data[i][offset(at, strides[i])];
    values.push_back(apply_pointwise(node.op, node.dtype, x));
  });
  return values;
}

Values Evaluator::reduce(const Node& node) const {
  const Shape& from = graph_[node.args[0]].shape;
  const Values& source = of(node.args[0]);
  const Index strides = strides_of(from, batch_);
  Index inner = extents_of(from, batch_);  // what is reduced; the rest stays
  for (size_t axis = 0; axis < kAxes; ++axis) {
    if (!(node.axes & axis_bit(static_cast<Axis>(axis)))) inner[axis] = 1;
  }
  Values values, gathered;
  for_each_index(extents_of(node.shape, batch_), [&](const Index& at) {
    gathered.clear();
    const int64_t base = offset(at, strides);
    for_each_index(inner, [&](const Index& within) {
      gathered.push_back(source[static_cast<size_t>(base + offset(within, strides))]);
    });
    values.push_back(finish_of(node.finish, gathered));
  });
  return values;
}

Values Evaluator::scan(const Node& node) const {
  Values values = of(node.args[0]);
  const auto features = static_cast<size_t>(node.shape.features);
  for (size_t i = 0; i < values.size(); ++i) {
    if (i % features != 0) values[i] += values[i - 1];
  }
  return values;
}

Values Evaluator::matmul(const Node& node) const {
  const Shape& a = graph_[node.args[0]].shape;
  const Shape& b = graph_[node.args[1]].shape;
  const int64_t k = a.features, n = node.shape.features;
  // One b for the whole batch: its rows are rows of one product.
  const int64_t products = b.batched ? batch_ : 1;
  const int64_t m = b.batched ? a.rows : a.elements(batch_) / k;
  Values values(static_cast<size_t>(node.shape.elements(batch_)), 0.0);
  for (int64_t i = 0; i < products; ++i) {
    const double* a_data = of(node.args[0]).data() + (a.batched ? i * m * k : 0);
    const double* b_data = of(node.args[1]).data() + i * n * k;
    const Values turned = node.transpose_b ? transposed(b_data, n, k) : Values();
    multiply(a_data, node.transpose_b ? turned.data() : b_data, values.data() + i * m * n, m, n, k);
  }
  return values;
}

Values Evaluator::evaluate_node(const Node& node, const ingot_tensor*& next_leaf) const {
  switch (node.kind) {
    case NodeKind::leaf:
      return load(*next_leaf++);
    case NodeKind::constant:
      return {node.constant};
    case NodeKind::matmul:
      return matmul(node);
    case NodeKind::pointwise:
      return pointwise(node);
    case NodeKind::reduce:
      return reduce(node);
    case NodeKind::view:
      return of(node.args[0]);
    case NodeKind::scan:
      return scan(node);
  }
  return {};
}

void Evaluator::run() {
  check_tensors();
  find_last_uses();
  const ingot_tensor* next_leaf = tensors_.data();
  for (size_t id = 0; id < graph_.nodes.size(); ++id) {
    const Node& node = graph_.nodes[id];
    values_[id] = evaluate_node(node, next_leaf);
    for (const ValueId arg : node.args) {
      if (last_use_[static_cast<size_t>(arg)] == id) values_[static_cast<size_t>(arg)] = Values();
    }
  }
  const std::vector<ValueId> leaves = graph_.leaves();
  for (size_t i = 0; i < graph_.results.size(); ++i) {
    store(tensors_[leaves.size() + i], of(graph_.results[i].value));
  }
  for (const Update& update : graph_.updates) {
    const auto leaf = std::find(leaves.begin(), leaves.end(), update.buffer) - leaves.begin();
    store(tensors_[static_cast<size_t>(leaf)], of(update.value));
  }
}

}  // namespace

void evaluate(const Graph& graph, int64_t batch, std::span<const ingot_tensor> tensors) {
  graph.validate();
  Evaluator(graph, batch, tensors).run();
}

}  // namespace ingot
