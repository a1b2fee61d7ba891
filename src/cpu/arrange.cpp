#include "cpu/arrange.h"

#include <algorithm>
#include <map>
#include <set>

namespace ingot::cpu {
namespace {

const Slot& slot_at(const Phase& phase, int index) {
  return phase.slots[static_cast<size_t>(index)];
}

std::vector<int> outputs_of(const Phase& phase, const Step& step) {
  if (step.kind != Step::Kind::reduce) return {step.out};
  std::vector<int> outputs;
  for (const auto& read : phase.reductions[static_cast<size_t>(step.state)].reads) {
    outputs.push_back(read.slot);
  }
  return outputs;
}

std::vector<int> inputs_of(const Step& step) {
  return {step.in.begin(), step.in.begin() + step.arity};
}

bool together(const Phase& phase, const Step& a, const Step& b) {
  return a.kind == Step::Kind::pointwise && b.kind == Step::Kind::pointwise && a.cls == b.cls &&
         a.hoisted == b.hoisted && slot_at(phase, a.out).varies == slot_at(phase, b.out).varies;
}

// What is done first of several steps that could be next: what is small, since it may let a later
// run go on; then reductions, for the same reason.
int urgency(const Phase& phase, const Step& step) {
  if (step.kind == Step::Kind::reduce) return 1;
  for (size_t axis = 0; axis < kAxes; ++axis) {
    if (!slot_at(phase, step.out).varies[axis] && !phase.space_is_one(axis)) return 0;
  }
  return 2;
}

// The steps whose inputs are there, and which of them is next: one that goes together with the last
// before all others, then by rank, then as they came.
class ReadySteps {
 public:
  explicit ReadySteps(const Phase& phase) : phase_(phase) {}

  bool empty() const { return by_rank_.empty(); }

  void add(int index) {
    const Step& step = step_at(index);
    by_rank_.emplace(rank(step), index);
    if (step.kind == Step::Kind::pointwise) kind_of(step).insert(index);
  }

  int take(int last) {
    int next = by_rank_.begin()->second;
    if (last >= 0 && step_at(last).kind == Step::Kind::pointwise) {
      const std::set<int>& alike = kind_of(step_at(last));
      if (!alike.empty()) next = *alike.begin();
    }
    const Step& step = step_at(next);
    by_rank_.erase({rank(step), next});
    if (step.kind == Step::Kind::pointwise) kind_of(step).erase(next);
    return next;
  }

 private:
  const Step& step_at(int index) const { return phase_.steps[static_cast<size_t>(index)]; }
  int rank(const Step& step) const { return urgency(phase_, step) + (step.hoisted ? 0 : 3); }

  // Of those that go together with the step.
  std::set<int>& kind_of(const Step& step) {
    for (auto& [first, steps] : kinds_) {
      if (together(phase_, step_at(first), step)) return steps;
    }
    const int index = static_cast<int>(&step - phase_.steps.data());
    return kinds_.emplace_back(index, std::set<int>()).second;
  }

  const Phase& phase_;
  std::set<std::pair<int, int>> by_rank_;
  std::vector<std::pair<int, std::set<int>>> kinds_;  // a few: by a step of theirs
};

std::vector<Step> ordered(const Phase& phase) {
  const size_t count = phase.steps.size();
  std::map<int, size_t> maker;  // of a slot
  for (size_t i = 0; i < count; ++i) {
    for (const int out : outputs_of(phase, phase.steps[i])) maker[out] = i;
  }
  std::vector<int> missing(count, 0);
  std::vector<std::vector<int>> readers(count);
  ReadySteps ready(phase);
  for (size_t i = 0; i < count; ++i) {
    for (const int in : inputs_of(phase.steps[i])) {
      const auto made = maker.find(in);
      if (made == maker.end()) continue;
      readers[made->second].push_back(static_cast<int>(i));
      ++missing[i];
    }
    if (missing[i] == 0) ready.add(static_cast<int>(i));
  }
  std::vector<Step> done;
  for (int last = -1; !ready.empty();) {
    last = ready.take(last);
    done.push_back(phase.steps[static_cast<size_t>(last)]);
    for (const int reader : readers[static_cast<size_t>(last)]) {
      if (--missing[static_cast<size_t>(reader)] == 0) ready.add(reader);
    }
  }
  return done;
}

// The operands of the steps [begin, end) as one run; last_reader: of each slot, the last step that
// reads it, beyond them all for what others read.
Run run_of(const Phase& phase, int begin, int end, const std::vector<int>& last_reader) {
  Run run{begin, end, {}, {}};
  std::set<int> made, seen;
  for (int i = begin; i < end; ++i) {
    const Step& step = phase.steps[static_cast<size_t>(i)];
    for (const int in : inputs_of(step)) {
      if (!made.contains(in) && seen.insert(in).second) run.outer.push_back(in);
    }
    made.insert(step.out);
  }
  for (const int slot : made) {
    const bool shared = last_reader[static_cast<size_t>(slot)] >= end;
    (shared ? run.outer : run.inner).push_back(slot);
  }
  return run;
}

void cut_into_runs(Phase* phase) {
  const int count = static_cast<int>(phase->steps.size());
  const auto step = [&](int i) -> Step& { return phase->steps[static_cast<size_t>(i)]; };
  std::vector<int> last_reader(phase->slots.size(), -1);
  for (int i = 0; i < count; ++i) {
    for (const int in : inputs_of(step(i))) last_reader[static_cast<size_t>(in)] = i;
  }
  for (const auto& store : phase->stores) last_reader[static_cast<size_t>(store.slot)] = count;
  for (const auto& state : phase->statistics) last_reader[static_cast<size_t>(state.arg)] = count;
  for (int begin = 0; begin < count;) {
    int end = begin + 1;
    while (end < std::min(count, begin + kMaxRunSteps) &&
           together(*phase, step(begin), step(end))) {
      ++end;
    }
    Run run{begin, end, {}, {}};
    if (step(begin).kind == Step::Kind::pointwise) {
      run = run_of(*phase, begin, end, last_reader);
      while (run.outer.size() > kMaxOperands) run = run_of(*phase, begin, --end, last_reader);
    }
    for (const int slot : run.inner) phase->slots[static_cast<size_t>(slot)].inner = true;
    std::vector<int> operands = run.outer;
    operands.insert(operands.end(), run.inner.begin(), run.inner.end());
    for (int i = begin; i < end && step(i).kind == Step::Kind::pointwise; ++i) {
      const auto place = [&](int slot) {
        return static_cast<int>(std::find(operands.begin(), operands.end(), slot) -
                                operands.begin());
      };
      step(i).operands[0] = place(step(i).out);
      for (size_t k = 0; k < static_cast<size_t>(step(i).arity); ++k) {
        step(i).operands[k + 1] = place(step(i).in[k]);
      }
    }
    phase->runs.push_back(std::move(run));
    begin = end;
  }
}

}  // namespace

void arrange(Phase* phase) {
  for (Step& step : phase->steps) {
    step.hoisted = true;
    for (const int in : inputs_of(step)) {
      step.hoisted = step.hoisted && !slot_at(*phase, in).varies[kBatch];
    }
  }
  phase->steps = ordered(*phase);
  cut_into_runs(phase);
}

// One whose last reader has run is used again, at once even, since operations go element by
// element. Hoisted values and what is read at the end keep theirs.
void assign_buffers(Phase* phase) {
  std::vector<int> last_use(phase->slots.size(), -1);
  const int end = static_cast<int>(phase->steps.size());
  for (int i = 0; i < end; ++i) {
    const Step& step = phase->steps[static_cast<size_t>(i)];
    for (const int in : inputs_of(step)) {
      last_use[static_cast<size_t>(in)] = step.hoisted && !slot_at(*phase, in).inner ? end : i;
    }
    if (!step.hoisted) continue;
    for (const int out : outputs_of(*phase, step)) {
      if (!slot_at(*phase, out).inner) last_use[static_cast<size_t>(out)] = end;
    }
  }
  for (const auto& store : phase->stores) last_use[static_cast<size_t>(store.slot)] = end;
  for (const auto& state : phase->statistics) last_use[static_cast<size_t>(state.arg)] = end;

  std::vector<int> free;
  const auto take = [&](Slot* slot) {
    BufferClass wanted{slot->cls, slot->varies, slot->inner};
    if (slot->inner) wanted.varies = {};
    for (auto it = free.begin(); it != free.end(); ++it) {
      if (phase->buffers[static_cast<size_t>(*it)] == wanted) {
        slot->buffer = *it;
        free.erase(it);
        return;
      }
    }
    slot->buffer = static_cast<int>(phase->buffers.size());
    phase->buffers.push_back(wanted);
  };
  for (Slot& slot : phase->slots) {
    if (slot.kind == Slot::Kind::load) take(&slot);
  }
  for (int i = 0; i < end; ++i) {
    const Step& step = phase->steps[static_cast<size_t>(i)];
    std::set<int> dead;
    for (const int in : inputs_of(step)) {
      if (last_use[static_cast<size_t>(in)] == i) dead.insert(in);
    }
    const auto release = [&] {
      for (const int in : dead) {
        const Slot& slot = slot_at(*phase, in);
        if (slot.kind == Slot::Kind::computed && slot.buffer >= 0) free.push_back(slot.buffer);
      }
    };
    // A reduction reads its argument after it has begun to write; a pointwise operation does not.
    if (step.kind == Step::Kind::pointwise) release();
    for (const int out : outputs_of(*phase, step)) {
      take(&phase->slots[static_cast<size_t>(out)]);
      (step.hoisted ? phase->strip_slots : phase->tile_slots).push_back(out);
    }
    if (step.kind != Step::Kind::pointwise) release();
  }
}

}  // namespace ingot::cpu
