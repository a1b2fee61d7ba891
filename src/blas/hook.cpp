#include "blas/hook.h"

#include <optional>

namespace ingot::blas {
namespace {

constinit Real<Status(Handle, int*)> get_pointer_mode("cublasGetPointerMode_v2");
constinit Real<Status(Handle, int*)> get_math_mode("cublasGetMathMode");
constinit Real<Status(Handle, Stream*)> get_stream("cublasGetStream_v2");

// What the handle says of it; where that is no, why.
Outcome complete(const HandleCall& call, Request& request) {
  int pointer_mode = 0, math_mode = 0;
  if (call.handle == nullptr || call.alpha == nullptr || call.beta == nullptr ||
      hand_on(get_pointer_mode, call.handle, &pointer_mode) != kSuccess ||
      hand_on(get_math_mode, call.handle, &math_mode) != kSuccess ||
      hand_on(get_stream, call.handle, &request.stream) != kSuccess) {
    return Outcome::unusual;
  }
  const auto* alpha = static_cast<const float*>(call.alpha);
  const auto* beta = static_cast<const float*>(call.beta);
  if (pointer_mode == kHost) {
    request.scalars = {*alpha, *beta};
  } else {
    request.alpha = alpha;
    request.beta = beta;
  }
  request.precision = precision_of(call.compute_type, math_mode, settings());
  return request.precision;
}

Answer decide(const HandleCall& call, const Product& product) {
  if (!is_sound(product)) return {Outcome::unusual, 0};
  Request request;
  request.product = product;
  request.pointers = call.pointers;
  if (!call.pointers) merge_batches(request.product);
  if (const std::optional<Outcome> no = refuses(request.product)) return {*no, 0};
  const Outcome outcome = complete(call, request);
  if (call.pointers && is_taken(outcome) && !pays_by_pointers(product, outcome)) {
    return {Outcome::pointer_batch, 0};
  }
  return is_taken(outcome) ? run(request) : Answer{outcome, 0};
}

}  // namespace

Answer take(const HandleCall& call, Product product) {
  const Answer answer = decide(call, product);
  count(call.function, product, answer.outcome);
  return answer;
}

}  // namespace ingot::blas
