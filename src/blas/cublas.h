// What of cuBLAS's interface (cublas_api.h, cublasLt.h, library_types.h) is needed here: nothing of
// CUDA is needed to build Ingot.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ingot::blas {

using Handle = void*;
using Stream = void*;
using Status = int;
inline constexpr Status kSuccess = 0, kNotInitialised = 1;

enum Operation : int { kNone = 0, kTranspose = 1, kConjugate = 2 };
enum DataType : int { kR32f = 0 };
enum PointerMode : int { kHost = 0, kDevice = 1 };
enum ComputeType : int { kCompute32f = 68, kCompute32fPedantic = 69, kComputeFastTf32 = 77 };
// The lower four bits of a math mode; above them are flags that say nothing to fp32.
enum MathMode : int { kDefaultMath = 0, kPedanticMath = 2, kTf32Math = 3, kMathModes = 15 };

}  // namespace ingot::blas
