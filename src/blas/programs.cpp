#include "blas/programs.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>
#include <vector>

#include "blas/kept_programs.h"
#include "blas/library.h"
#include "blas/pointer_batch.h"
#include "blas/workspace.h"

namespace ingot::blas {
namespace {

constexpr size_t kAlignment = 256;  // of what lies in a workspace

// A product, or a batch that one launch multiplies, with all that was settled before its launch.
struct Call {
  GraphKey key;
  Matrices matrices;
  Program* program = nullptr;
  Prepared prepared;
};

Call call_of(const Product& product, const Request& request, const Place& place, bool capturing) {
  Call call;
  const bool given = request.alpha != nullptr;
  call.matrices = matrices_of(product);
  call.key = key_of(call.matrices, request, given || !scalars_fit(request.scalars));
  call.program = program_of(call.key, request.precision, place.device);
  if (call.program == nullptr) {
    call.prepared.outcome = Outcome::shapes;
  } else if (!call.program->broken) {
    Request known = request;
    if (!given) known.alpha = known.beta = product.c;  // any place: they will lie in the workspace
    const Tensors tensors = tensors_of(call.key, call.matrices, known, place.device);
    call.prepared = prepared(*call.program, tensors, request.precision, capturing);
  }
  return call;
}

// Behind what the program needs there is room for alpha and beta.
size_t bytes_of(const Call& call) {
  return (call.prepared.workspace + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
}

bool launch(const Call& call, Request request, const Place& place, void* workspace) {
  if (call.key.scalars_in_memory && request.alpha == nullptr) {
    auto* const scalars =
        reinterpret_cast<float*>(static_cast<char*>(workspace) + bytes_of(call) - kAlignment);
    const auto set = [&](float* to, float value) {
      return driver()->cuMemsetD32Async(to, std::bit_cast<unsigned>(value), 1, request.stream) == 0;
    };
    if (!set(scalars, request.scalars.alpha) || !set(scalars + 1, request.scalars.beta)) {
      return false;
    }
    request.alpha = scalars;
    request.beta = scalars + 1;
  }
  const Tensors t = tensors_of(call.key, call.matrices, request, place.device);
  return ingot().run(call.program->handle, t.layout.batch, t.list.data(), t.count, workspace,
                     bytes_of(call) - kAlignment, request.stream) == INGOT_OK;
}

// All that is to be launched, of which nothing is refused any more but by launches that fail.
struct Calls {
  Outcome outcome = Outcome::failed;
  std::vector<Call> list;
  size_t bytes = 0;

  void add(Call call) {
    outcome = call.prepared.outcome;
    bytes = std::max(bytes, bytes_of(call));
    list.push_back(std::move(call));
  }
};

Calls calls_of(const Request& request, const Place& place, bool capturing) {
  const Product& product = request.product;
  if (product.batches == 1 || matrices_of(product).results_follow()) {
    Calls whole;
    whole.add(call_of(product, request, place, capturing));
    // What does not pay in one launch may pay in many.
    if (whole.outcome != Outcome::library_faster) return whole;
  }
  Calls each;
  each.outcome = Outcome::library_faster;
  if (product.batches == 1 || request.whole || !may_run_one_by_one(product)) return each;
  for (int64_t i = 0; i < product.batches; ++i) {
    each.add(call_of(entry_of(product, i), request, place, capturing));
    if (!is_taken(each.outcome)) break;
  }
  return each;
}

Answer launch_all(const Calls& calls, const Request& request, const Place& place, void* workspace) {
  Answer answer = {request.precision, 0};
  for (const Call& call : calls.list) {
    if (!launch(call, request, place, workspace)) {
      answer.outcome = fail(*call.program, "launching");
      break;
    }
    answer.done += call.matrices.batches;
  }
  return answer;
}

Answer run_calls(const Request& request, const Place& place, bool capturing) {
  const Calls calls = calls_of(request, place, capturing);
  if (!is_taken(calls.outcome)) return {calls.outcome, 0};
  const Scratch scratch = scratch_for(place, request.stream, calls.bytes, capturing);
  if (scratch.memory == nullptr) return {Outcome::memory, 0};
  return launch_all(calls, request, place, scratch.memory);
}

// Nothing of it is done unless all is.
Answer run_pointers(const Request& request, const Place& place, bool capturing) {
  const PointerBatch batch(request.product, *request.pointers);
  const Outcome ready = PointerBatch::prepare(place.device, capturing);
  if (!is_taken(ready)) return {ready, 0};
  Request dense = request;
  dense.scalars = {};
  dense.alpha = dense.beta = nullptr;
  // Wherever the memory will lie, it is aligned so.
  dense.product = batch.product(reinterpret_cast<void*>(kAlignment));
  const Calls planned = calls_of(dense, place, capturing);
  if (!is_taken(planned.outcome)) return {planned.outcome, 0};
  const Scratch scratch =
      scratch_for(place, request.stream, batch.bytes() + planned.bytes, capturing);
  if (scratch.memory == nullptr) return {Outcome::memory, 0};
  dense.product = batch.product(scratch.memory);
  const Calls calls = calls_of(dense, place, capturing);
  if (!is_taken(calls.outcome)) return {calls.outcome, 0};
  Program& program = *calls.list.front().program;
  if (!batch.gather(scratch.memory, place.device, request.stream)) {
    return {fail(program, "gathering its operands"), 0};
  }
  const Answer answer =
      launch_all(calls, dense, place, static_cast<char*>(scratch.memory) + batch.bytes());
  if (!is_taken(answer.outcome)) return {answer.outcome, 0};
  if (!batch.scatter(scratch.memory, request, place.device)) {
    return {fail(program, "scattering its results"), 0};
  }
  return answer;
}

Answer try_run(const Request& request) {
  const Scalars& s = request.scalars;
  if (request.alpha == nullptr) {
    if (s.alpha == 0) return {Outcome::zero_alpha, 0};
    if (!std::isfinite(s.alpha) || !std::isfinite(s.beta)) return {Outcome::scalars, 0};
  }
  const Place place = place_of(request.stream);
  if (!place.known) return {Outcome::device, 0};
  const BelowHook below;
  if (!ingot().complete) return {Outcome::unavailable, 0};
  const bool capturing = is_capturing(request.stream);
  if (capturing && !settings().takes_captured) return {Outcome::capturing, 0};
  return request.pointers ? run_pointers(request, place, capturing)
                          : run_calls(request, place, capturing);
}

}  // namespace

Answer run(const Request& request) {
  try {
    return try_run(request);
  } catch (...) {  // no memory on the host, if anything
    return {Outcome::failed, 0};
  }
}

}  // namespace ingot::blas
