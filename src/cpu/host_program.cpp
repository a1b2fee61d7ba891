// Host programs told to people: as JSON, and by a hash of all that they do.
#include "cpu/host_program.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>

#include "cpu/isa.h"

namespace ingot::cpu {
namespace {

using nlohmann::json;

std::string words(std::initializer_list<int64_t> numbers) {
  return fmt::format("{} ", fmt::join(numbers, " "));
}

std::string text_of(const StateStep& state) {
  std::string text = words({static_cast<int>(state.monoid), state.arg, state.axes});
  for (const StateStep::Read& read : state.reads) {
    text += words({static_cast<int>(read.finish), read.slot});
  }
  return text;
}

std::string text_of(const Phase& phase) {
  std::string text;
  for (const Slot& slot : phase.slots) {
    text += words({static_cast<int>(slot.kind), static_cast<int>(slot.cls),
                   static_cast<int>(slot.dtype), slot.load, slot.store,
                   std::bit_cast<int64_t>(slot.constant)});
    for (const bool varies : slot.varies) text += varies ? '1' : '0';
  }
  for (const Step& step : phase.steps) {
    text += words({static_cast<int>(step.kind), static_cast<int>(step.op),
                   static_cast<int>(step.composite), static_cast<int>(step.cls),
                   static_cast<int>(step.dtype), step.out, step.arity, step.state, step.hoisted});
    text += fmt::format("{} ", fmt::join(step.in, " "));
  }
  for (const StateStep& state : phase.reductions) text += text_of(state);
  for (const StateStep& state : phase.statistics) text += text_of(state);
  for (const Phase::Store& store : phase.stores) text += words({store.slot});
  return text;
}

// A step, told: what it is beside its kind, its sweep and its memory; the memory that it reads and
// writes; the phase that it runs.
struct Told {
  json details;
  std::vector<BoundMemory> memory{};
  const Phase* phase = nullptr;
};

Told tell(const PackStep& step, const Plan&) {
  return {{{"kernel", step.provider->name()},
           {"n", step.call.n},
           {"k", step.call.k},
           {"ldb", step.call.ldb},
           {"transpose_b", step.call.transpose_b}},
          {{step.b}, {step.packed}}};
}

Told tell(const PhaseStep& step, const Plan&) {
  Told told{{{"part", step.tail ? "tail" : "body"},
             {"tile", step.tiles.tile},
             {"task_rows", step.tiles.batch_chunk},
             {"tasks", step.tiles.tasks()}}};
  told.phase = step.phase;
  for (size_t i = 0; i < step.loads.size(); ++i) {
    const std::vector<size_t>& product = step.product_loads;
    const bool handed = std::find(product.begin(), product.end(), i) != product.end();
    if (!handed) told.memory.push_back(step.loads[i]);
  }
  told.memory.insert(told.memory.end(), step.stores.begin(), step.stores.end());
  told.memory.push_back({step.partials});
  return told;
}

Told tell(const ProductStep& step, const Plan& plan) {
  const ProductCall& call = step.call;
  const bool adds = step.row.base != Address::Base::none;
  Told told;
  if (step.behind) {
    Told behind = tell(step.behind_row ? *step.behind_row : *step.behind, plan);
    told.phase = behind.phase;
    if (!adds || step.behind_row) told = std::move(behind);
    told.details["with"] = plan.sweeps[static_cast<size_t>(step.follower)].name;
    told.details["how"] = !adds             ? "on its blocks"
                          : step.behind_row ? "adds a row before it"
                                            : "adds a row";
  }
  told.details.update({{"kernel", step.providers.empty() ? "none" : step.providers[0]->name()},
                       {"m", call.m},
                       {"n", call.n},
                       {"k", call.k},
                       {"lda", call.lda},
                       {"ldb", call.ldb},
                       {"ldc", call.ldc},
                       {"transpose_b", call.transpose_b},
                       {"batches", step.batches}});
  const auto dtype = static_cast<DType>(call.dtype);
  std::vector<BoundMemory> own = {
      {step.a, {step.a_step}, dtype}, {step.b, {step.b_step}, dtype}, {step.packed_b}, {step.row}};
  if (step.is_kept) own.push_back({step.c, {step.c_step}, dtype});
  told.memory.insert(told.memory.begin(), own.begin(), own.end());
  return told;
}

Told tell(const MergeStep& step, const Plan&) {
  Told told{{{"elements", step.kept}, {"chunks", step.tiles.chunks}},
            {{step.partials}, {step.states}},
            step.phase};
  for (const Address& address : step.finished) told.memory.push_back({address});
  return told;
}

Told tell(const CopyStep& step, const Plan&) {
  Told told{{{"sizes", step.sizes}}, {step.from, step.to}};
  if (step.constant) told.details["constant"] = fmt::format("{}", *step.constant);
  return told;
}

Told tell(const HostStep& step, const Plan& plan) {
  Told told = std::visit([&](const auto& what) { return tell(what, plan); }, step.what);
  told.details["kind"] = name_of(step.kind());
  told.details["sweep"] = step.sweep < 0 ? "" : plan.sweeps[static_cast<size_t>(step.sweep)].name;
  if (!step.why.empty()) told.details["why"] = step.why;
  return told;
}

}  // namespace

StepKind HostStep::kind() const {
  constexpr StepKind kKinds[] = {StepKind::pack, StepKind::product, StepKind::sweep,
                                 StepKind::merge, StepKind::copy};
  return kKinds[what.index()];
}

json describe(const HostProgram& program, const Plan& plan) {
  const Describer describer(plan.graph, program.buffers);
  json steps = json::array();
  std::string text(name_of(program.level));
  for (const HostStep& step : program.steps) {
    Told told = tell(step, plan);
    text += told.details.dump();
    if (told.phase != nullptr) text += text_of(*told.phase);
    std::vector<Address> addresses;
    for (const BoundMemory& memory : told.memory) {
      addresses.push_back(memory.address);
      text += text_of(memory.address) +
              fmt::format("{} {} ", fmt::join(memory.strides, " "), name_of(memory.dtype));
    }
    told.details["memory"] = describer.memory(addresses, steps.size());
    steps.push_back(std::move(told.details));
  }
  return {{"hash", hash_of_text(text)}, {"steps", steps}, {"buffers", describer.buffers()}};
}

}  // namespace ingot::cpu
