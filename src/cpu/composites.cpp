#include "cpu/composites.h"

#include <algorithm>
#include <map>
#include <set>

#include "cpu/arrange.h"

namespace ingot::cpu {
namespace {

static_assert(static_cast<int>(PointwiseOp::select_) == static_cast<int>(Pointwise::select_));

// A composition to be looked for.
struct Pattern {
  enum class Kind { argument, number, apply } kind;
  int argument = 0;
  double number = 0;
  PointwiseOp op = PointwiseOp::add_;
  std::vector<Pattern> args;
};

template <class P>
struct PatternOf;
template <int index>
struct PatternOf<composite::Arg<index>> {
  static Pattern make() { return {Pattern::Kind::argument, index, 0, PointwiseOp::add_, {}}; }
};
template <double value>
struct PatternOf<composite::Number<value>> {
  static Pattern make() { return {Pattern::Kind::number, 0, value, PointwiseOp::add_, {}}; }
};
template <Pointwise op, class... Args>
struct PatternOf<composite::Apply<op, Args...>> {
  static Pattern make() {
    return {Pattern::Kind::apply, 0, 0, static_cast<PointwiseOp>(op), {PatternOf<Args>::make()...}};
  }
};

const std::vector<Pattern>& patterns() {
  using namespace composite;
  static const std::vector<Pattern> all = {
#define INGOT_COMPOSITE_PATTERN(name, ...) PatternOf<__VA_ARGS__>::make(),
      INGOT_COMPOSITES(INGOT_COMPOSITE_PATTERN)
#undef INGOT_COMPOSITE_PATTERN
  };
  return all;
}

bool commutes(PointwiseOp op) {
  return op == PointwiseOp::add_ || op == PointwiseOp::mul_;
}

class Composer {
 public:
  explicit Composer(Phase* phase) : phase_(*phase), uses_(phase->slots.size()) {
    for (size_t i = 0; i < phase_.steps.size(); ++i) {
      const Step& step = phase_.steps[i];
      for (int k = 0; k < step.arity; ++k) ++uses(step.in[static_cast<size_t>(k)]);
      if (step.kind == Step::Kind::pointwise && step.cls == Class::single) maker_[step.out] = i;
    }
    for (const auto& store : phase_.stores) ++uses(store.slot);
    for (const auto& state : phase_.statistics) ++uses(state.arg);
  }

  void run() {
    for (size_t p = 0; p < patterns().size(); ++p) {
      // From the end, where the roots of the largest trees are.
      for (size_t i = phase_.steps.size(); i-- > 0;) {
        if (phase_.steps[i].composite == Composite::none) compose(i, static_cast<Composite>(p));
      }
    }
    std::vector<Step> left;
    for (size_t i = 0; i < phase_.steps.size(); ++i) {
      if (!gone_.contains(i)) left.push_back(phase_.steps[i]);
    }
    phase_.steps = std::move(left);
  }

 private:
  struct Match {
    std::array<int, kCompositeArity> args;
    std::vector<size_t> steps;  // that it stands for
  };

  int& uses(int slot) { return uses_[static_cast<size_t>(slot)]; }
  const Slot& slot(int index) const { return phase_.slots[static_cast<size_t>(index)]; }

  void compose(size_t root, Composite composite) {
    Step& step = phase_.steps[root];
    const auto made = maker_.find(step.out);
    if (made == maker_.end() || made->second != root || gone_.contains(root)) return;
    Match match;
    match.args.fill(-1);
    if (!matches(patterns()[static_cast<size_t>(composite)], step.out, step.out, &match)) return;
    for (const size_t taken : match.steps) {
      if (taken != root) gone_.insert(taken);
    }
    step.composite = composite;
    const auto end = std::find(match.args.begin(), match.args.end(), -1);
    step.arity = static_cast<int>(end - match.args.begin());
    std::copy(match.args.begin(), end, step.in.begin());
  }

  // Whether the slot holds what the pattern describes; what is between it and the arguments must
  // be read by nobody else and be as large as the result.
  bool matches(const Pattern& pattern, int found, int root, Match* match) {
    if (pattern.kind == Pattern::Kind::number) {
      return slot(found).kind == Slot::Kind::constant && slot(found).constant == pattern.number;
    }
    if (pattern.kind == Pattern::Kind::argument) {
      int& bound = match->args[static_cast<size_t>(pattern.argument)];
      if (bound >= 0) return bound == found;
      bound = found;
      return true;
    }
    const auto made = maker_.find(found);
    if (made == maker_.end() || gone_.contains(made->second)) return false;
    const Step& step = phase_.steps[made->second];
    if (step.op != pattern.op || step.composite != Composite::none) return false;
    if (found != root && (uses(found) != 1 || slot(found).varies != slot(root).varies)) {
      return false;
    }
    const Match before = *match;
    match->steps.push_back(made->second);
    const Match taken = *match;
    const auto in_order = [&](bool swapped) {
      for (size_t k = 0; k < pattern.args.size(); ++k) {
        const int arg = step.in[swapped ? 1 - k : k];
        if (!matches(pattern.args[k], arg, root, match)) return false;
      }
      return true;
    };
    if (in_order(false)) return true;
    *match = taken;
    if (commutes(step.op) && in_order(true)) return true;
    *match = before;
    return false;
  }

  Phase& phase_;
  std::vector<int> uses_;        // readers of each slot
  std::map<int, size_t> maker_;  // by slot: the pointwise step that makes it
  std::set<size_t> gone_;        // steps that others stand for now
};

}  // namespace

void compose(Phase* phase) {
  Composer(phase).run();
}

}  // namespace ingot::cpu
