// Kernels' own special functions (common/math.cuh) against double precision on the GPU, at every
// 61st of all float numbers and at the special ones.
//
//   nvcc -arch=native -std=c++20 -Ikernels tests/cuda/functions_check.cu -o check && ./check
#include <cmath>
#include <cstdio>

#include "common/math.cuh"

namespace {

namespace math = ingot::math;

constexpr unsigned kStep = 61;
constexpr double kLeast = 0x1p-120;  // below it results may be flushed to 0

struct Point {
  double found, exact;
};

// Of each function: its value, and how far it may be off for argument a: absolutely, relatively.
struct OnePlusErf {
  static constexpr const char* kName = "one_plus_erf";
  __device__ static Point at(float a) { return {math::one_plus_erf(a), erfc(-double(a))}; }
  __device__ static double absolute(double) { return 2.5e-7; }
  __device__ static double relative(double a) { return a < -6.5 ? 1 : 5e-7 + 2e-7 * a * a; }
};
struct OnePlusTanh {
  static constexpr const char* kName = "one_plus_tanh";
  __device__ static Point at(float a) {
    return {math::one_plus_tanh(a), 2 / (1 + exp(-2 * double(a)))};
  }
  __device__ static double absolute(double) { return 2.5e-7; }
  __device__ static double relative(double a) { return 2.5e-7 + 1.5e-7 * fabs(a); }
};
struct ExpOfMinusSquare {
  static constexpr const char* kName = "exp_of_minus_square";
  __device__ static Point at(float a) {
    return {math::exp_of_minus_square(a), exp(-double(a) * double(a))};
  }
  __device__ static double absolute(double) { return 2.5e-7; }
  __device__ static double relative(double a) { return 2.5e-7 + 1.5e-7 * a * a; }
};
struct Rsqrt {
  static constexpr const char* kName = "rsqrt";
  __device__ static Point at(float a) { return {math::rsqrt(a), 1 / sqrt(double(a))}; }
  __device__ static double absolute(double) { return 1e300; }
  __device__ static double relative(double) { return 0x1p-22; }
};
struct Log {
  static constexpr const char* kName = "log";
  __device__ static Point at(float a) { return {math::log(a), log(double(a))}; }
  __device__ static double absolute(double) { return 1e300; }
  __device__ static double relative(double a) { return a < 0x1p-126 ? 3.2e-7 : 1.3e-7; }
};
struct CoarseExp {
  static constexpr const char* kName = "coarse::exp";
  __device__ static Point at(float a) {
    return {a > 88.7f ? math::infinity<double>() : math::coarse::exp(a),
            a > 88.7f ? math::infinity<double>() : exp(double(a))};
  }
  __device__ static double absolute(double) { return 1e300; }
  __device__ static double relative(double) { return 1e-5; }
};
struct CoarseSigmoid {
  static constexpr const char* kName = "coarse::sigmoid";
  __device__ static Point at(float a) {
    return {math::coarse::sigmoid(a), 1 / (1 + exp(-double(a)))};
  }
  __device__ static double absolute(double) { return 1e-6; }
  __device__ static double relative(double) { return 1e-5; }
};
struct CoarseSilu {
  static constexpr const char* kName = "coarse silu";
  __device__ static Point at(float a) {
    return {math::coarse::divide_by_normal(a, 1.f + math::coarse::exp(-a)),
            double(a) / (1 + exp(-double(a)))};
  }
  __device__ static double absolute(double) { return 1e300; }
  __device__ static double relative(double) { return 1e-5; }
};
struct CoarseTanh {
  static constexpr const char* kName = "coarse::tanh";
  __device__ static Point at(float a) { return {math::coarse::tanh(a), tanh(double(a))}; }
  __device__ static double absolute(double) { return 1; }
  __device__ static double relative(double) { return 0x1p-11 * 1.05; }
};
struct CoarseOnePlusErf {
  static constexpr const char* kName = "coarse::one_plus_erf";
  __device__ static Point at(float a) { return {math::coarse::one_plus_erf(a), erfc(-double(a))}; }
  __device__ static double absolute(double) { return 1.1e-5; }
  __device__ static double relative(double a) { return a < -6.5 ? 1 : 1.1e-5 + 2e-7 * a * a; }
};

struct Worst {
  // Bits of floats, which are ordered as the numbers are where none is negative.
  unsigned absolute, relative, of_allowed;
  unsigned wrong;
  float first;
};

template <class Function>
__global__ void check(Worst* worst) {
  const unsigned long long bits =
      kStep * (static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x);
  if (bits >= 1ull << 32) return;
  // 0, -0, both infinities and a NaN lie at no multiple of the step.
  const unsigned special[] = {0u, 0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc00000u};
  const unsigned own = bits < kStep * 5 ? special[bits / kStep] : static_cast<unsigned>(bits);
  const float a = __uint_as_float(own);
  const Point point = Function::at(a);
  bool good = isnan(point.exact) ? isnan(point.found) : true;
  if (isinf(point.exact)) good = point.found == point.exact;
  if (!isnan(point.exact) && !isinf(point.exact)) {
    const double absolute = fabs(point.found - point.exact);
    const double size = fabs(point.exact);
    const double relative = size < kLeast ? 0 : absolute / size;
    const double of_allowed =
        fmax(absolute / Function::absolute(a), relative / Function::relative(a));
    good = of_allowed <= 1 && absolute == absolute;
    atomicMax(&worst->absolute, __float_as_uint(float(absolute)));
    atomicMax(&worst->relative, __float_as_uint(float(relative)));
    atomicMax(&worst->of_allowed, __float_as_uint(float(of_allowed)));
  }
  if (!good && atomicAdd(&worst->wrong, 1) == 0) worst->first = a;
}

template <class Function>
unsigned run(Worst* worst) {
  *worst = {};
  const unsigned points = static_cast<unsigned>((1ull << 32) / kStep) + 1;
  check<Function><<<(points + 255) / 256, 256>>>(worst);
  if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) {
    std::printf("%s: %s\n", Function::kName, cudaGetErrorString(error));
    return 1;
  }
  const auto number = [](unsigned bits) {
    float value;
    static_assert(sizeof value == sizeof bits);
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  };
  std::printf("%-20s off by %.2e, of itself by %.2e, of what is allowed by %.2f\n", Function::kName,
              number(worst->absolute), number(worst->relative), number(worst->of_allowed));
  if (worst->wrong) std::printf("  %u wrong, the first at %a\n", worst->wrong, worst->first);
  return worst->wrong;
}

}  // namespace

int main() {
  Worst* worst = nullptr;
  if (cudaMallocManaged(&worst, sizeof *worst) != cudaSuccess) return 2;
  const unsigned wrong =
      run<OnePlusErf>(worst) + run<OnePlusTanh>(worst) + run<ExpOfMinusSquare>(worst) +
      run<Rsqrt>(worst) + run<Log>(worst) + run<CoarseExp>(worst) + run<CoarseSigmoid>(worst) +
      run<CoarseSilu>(worst) + run<CoarseTanh>(worst) + run<CoarseOnePlusErf>(worst);
  std::printf("%u wrong\n", wrong);
  return wrong ? 1 : 0;
}
