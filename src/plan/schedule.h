// When each value can be had, and from which kind of sweep: the waits of a graph.
#pragma once

#include <optional>
#include <vector>

#include "plan/factoring.h"
#include "plan/plan.h"

namespace ingot {

// How a value is had at the time of its label, apart from loading it at any later time.
enum class Via : uint8_t {
  free,     // pointwise from leaves and from values of earlier times: in any sweep that it fits
  product,  // in the epilogue of a product
  rows,     // in a sweep that owns whole rows
  tail,     // after the merge of a sweep's statistics
  stored    // written by a sweep of its own (a view that no sweep can see through)
};
struct Label {
  int time = 0;
  Via via = Via::free;
  int group = -1;  // into Schedule::groups, but for Via::free
};

// A sweep to be: what makes it necessary, before what it computes and loads is known.
struct Group {
  SweepKind kind = SweepKind::map;
  int time = 0;
  Shape space{};
  Factoring factoring{};  // of the space; grows as values with other factorings join
  ValueId matmul = kNoValue;
  ValueId kept = kNoValue;            // product: what it must store of every element
  std::vector<ValueId> reductions{};  // rows: resolved inside
  std::vector<ValueId> statistics{};  // product, columns
  AxisMask axes = 0;                  // of the reductions or statistics, over the space
  std::vector<ValueId> stores{};      // of the body, found from the last sweep to the first
  std::vector<ValueId> tail_stores{};
  std::vector<std::string> reasons{};
};

struct Schedule {
  std::vector<Label> labels;  // by value
  // By value: how it can be seen where it is evaluated together with all that it follows from.
  std::vector<Factoring> factorings;
  std::vector<Group> groups;
};

// cut_views: write every view that regroups elements as a dense copy of its own; always possible,
// seldom needed. Without it, nothing where views make it needed. deferred: copies that must come
// after everything else.
std::optional<Schedule> make_schedule(const Graph& graph, const Target& target, bool cut_views,
                                      const std::vector<ValueId>& deferred);

// What a product loads for an operand: the value behind its views, or, where that is a leaf (of any
// strides) whose axes a view merges, the view itself as a dense copy.
ValueId operand_source(const Graph& graph, ValueId operand);

// True where a view only renames axes of extent 1.
bool renames_only(const Shape& from, const Shape& to);

}  // namespace ingot
