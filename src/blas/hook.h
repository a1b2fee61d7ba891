// What every exported product does: decide, count, take, hand on.
#pragma once

#include "blas/library.h"
#include "blas/programs.h"
#include "blas/statistics.h"

namespace ingot::blas {

// Whether a call goes to the library with no further question.
inline bool passes_through() {
  return BelowHook::here() || !is_on();
}

// alpha and beta as given: where they lie on the device they are not read.
struct HandleCall {
  const char* function;
  Handle handle;
  int compute_type;
  const void *alpha, *beta;
  std::optional<Pointers> pointers = {};
};

// Does what Ingot takes of a sound or unsound product, whose batches it may merge, and counts it.
// What is left of the batch then, from `done` on, is the library's.
Answer take(const HandleCall& call, Product product);

// `rest` hands on to the library, from the given product of the batch on.
template <class Rest>
Status take_or_hand_on(const HandleCall& call, const Product& product, Rest rest) {
  const Answer answer = take(call, product);
  if (is_taken(answer.outcome)) return kSuccess;
  const BelowHook below;
  return rest(answer.done);
}

// Calls the real function, or says that cuBLAS is not there.
template <class Function, class... Arguments>
Status hand_on(Real<Function>& real, Arguments... arguments) {
  Function* const function = real.get();
  return function == nullptr ? kNotInitialised : function(arguments...);
}

}  // namespace ingot::blas
