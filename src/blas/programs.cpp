#include "blas/programs.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "blas/kept_programs.h"
#include "blas/library.h"
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

bool launch(const Call& call, Request request, const Place& place, const Scratch& scratch) {
  if (call.key.scalars_in_memory && request.alpha == nullptr) {
    auto* const scalars =
        reinterpret_cast<float*>(static_cast<char*>(scratch.memory) + bytes_of(call) - kAlignment);
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
  return ingot().run(call.program->handle, t.layout.batch, t.list.data(), t.count, scratch.memory,
                     bytes_of(call) - kAlignment, request.stream) == INGOT_OK;
}

Answer run_whole(const Request& request, const Place& place, bool capturing) {
  const Call call = call_of(request.product, request, place, capturing);
  if (!is_taken(call.prepared.outcome)) return {call.prepared.outcome, 0};
  const Scratch scratch = scratch_for(place, request.stream, bytes_of(call), capturing);
  if (scratch.memory == nullptr) return {Outcome::memory, 0};
  if (!launch(call, request, place, scratch)) return {fail(*call.program, "launching"), 0};
  return {request.precision, request.product.batches};
}

Answer run_one_by_one(const Request& request, const Place& place, bool capturing) {
  Answer answer;
  const Product& batch = request.product;
  // All that may be refused is known before anything is launched, but for launches that fail.
  size_t bytes = 0;
  const auto entry = [&](int64_t i) {
    return call_of(entry_of(batch, i), request, place, capturing);
  };
  for (int64_t i = 0; i < batch.batches; ++i) {
    const Call call = entry(i);
    if (!is_taken(call.prepared.outcome)) return {call.prepared.outcome, 0};
    bytes = std::max(bytes, bytes_of(call));
  }
  const Scratch scratch = scratch_for(place, request.stream, bytes, capturing);
  if (scratch.memory == nullptr) return {Outcome::memory, 0};
  for (; answer.done < batch.batches; ++answer.done) {
    const Call call = entry(answer.done);
    if (!launch(call, request, place, scratch)) {
      answer.outcome = fail(*call.program, "launching");
      return answer;
    }
  }
  answer.outcome = request.precision;
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
  if (request.product.batches == 1 || matrices_of(request.product).results_follow()) {
    const Answer answer = run_whole(request, place, capturing);
    // What does not pay in one launch may pay in many.
    if (answer.outcome != Outcome::library_faster) return answer;
  }
  const bool one_by_one = request.product.batches > 1 && !request.whole;
  if (!one_by_one || !may_run_one_by_one(request.product)) return {Outcome::library_faster, 0};
  return run_one_by_one(request, place, capturing);
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
