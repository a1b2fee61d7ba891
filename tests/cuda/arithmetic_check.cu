// Kernels' own arithmetic against IEEE 754 on the GPU: divisions without a branch, maximum, minimum
// and relu (common/math.cuh), on random bits, on their neighbourhoods and on every pair of special
// values.
//
//   nvcc -arch=native -std=c++20 -Ikernels tests/cuda/arithmetic_check.cu -o check && ./check
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "common/math.cuh"

namespace {

constexpr int kRandomPairs = 1 << 24;
constexpr float kModerate = 0x1p60f;

struct Results {
  float divided, by_normal, moderate, maximum, minimum, relu;
};

__global__ void compute(const float2* pairs, Results* results, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  namespace math = ingot::math;
  const float a = pairs[i].x, b = pairs[i].y;
  results[i] = {math::divide(a, b),  math::divide_by_normal(a, b), math::divide_moderate(a, b),
                math::maximum(a, b), math::minimum(a, b),          math::relu(a)};
}

std::vector<float2> make_pairs() {
  const float inf = std::numeric_limits<float>::infinity();
  std::vector<float> special = {0.f,       0x1p-149f,
                                0x1p-127f, 0x1p-126f,
                                0x1p-60f,  0x1p-24f,
                                1.f,       3.f,
                                0x1p60f,   0x1p126f,
                                0x1p127f,  0x1.fffffep127f,
                                inf,       std::numeric_limits<float>::quiet_NaN()};
  for (size_t i = 0, count = special.size(); i < count; ++i) {
    special.push_back(-special[i]);
    special.push_back(std::nextafter(special[i], 1.f));
  }
  std::vector<float2> pairs;
  for (const float a : special)
    for (const float b : special) pairs.push_back({a, b});
  std::mt19937 random(1);
  const auto bits = [&random] {
    const unsigned word = random();
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  };
  for (int i = 0; i < kRandomPairs; ++i) {
    // Every other pair lies close together in magnitude, where quotients are ordinary numbers.
    const float a = bits(), b = bits();
    pairs.push_back({a, i % 2 ? b
                              : std::copysign(std::ldexp(std::abs(a), int(random() % 9) - 4), b) *
                                    (1 + 0x1p-23f * float(random() % 4096))});
  }
  return pairs;
}

bool same(float found, float expected) {
  return std::isnan(expected) ? std::isnan(found) : found == expected;
}

// Distance in units of the last place of `expected`, or the smallest subnormal.
double units(float found, float expected) {
  if (same(found, expected)) return 0;
  if (!std::isfinite(found) || !std::isfinite(expected)) return 1e9;
  const double unit = double(std::nextafter(std::abs(expected), INFINITY)) - std::abs(expected);
  return std::abs(double(found) - double(expected)) / unit;
}

float larger(float a, float b) {
  return std::isnan(a) || a > b ? a : b;
}
float smaller(float a, float b) {
  return std::isnan(a) || a < b ? a : b;
}

struct Tally {
  const char* name;
  double worst = 0, most;
  long count = 0, wrong = 0;

  void add(const float2& pair, float found, float expected) {
    const double off = units(found, expected);
    ++count;
    worst = std::fmax(worst, off);
    // Of numerators this small the remainder is rounded.
    const double allowed = most > 0 && std::abs(pair.x) < 0x1p-100f ? 2 : most;
    if (off > allowed && wrong++ < 5)
      std::printf("%s(%a, %a) = %a, expected %a\n", name, pair.x, pair.y, found, expected);
  }
};

}  // namespace

int main() {
  const std::vector<float2> pairs = make_pairs();
  const int count = int(pairs.size());
  float2* inputs = nullptr;
  Results* outputs = nullptr;
  std::vector<Results> results(pairs.size());
  cudaMalloc(&inputs, pairs.size() * sizeof(float2));
  cudaMalloc(&outputs, pairs.size() * sizeof(Results));
  cudaMemcpy(inputs, pairs.data(), pairs.size() * sizeof(float2), cudaMemcpyHostToDevice);
  compute<<<(count + 255) / 256, 256>>>(inputs, outputs, count);
  cudaMemcpy(results.data(), outputs, results.size() * sizeof(Results), cudaMemcpyDeviceToHost);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
    std::printf("%s\n", cudaGetErrorString(error));
    return 2;
  }
  Tally divide{"divide", 0, 1}, normal{"divide_by_normal", 0, 1}, moderate{"divide_moderate", 0, 1};
  Tally maximum{"maximum", 0, 0}, minimum{"minimum", 0, 0}, relu{"relu", 0, 0};
  for (size_t i = 0; i < pairs.size(); ++i) {
    const float a = pairs[i].x, b = pairs[i].y, quotient = a / b;
    const Results& r = results[i];
    divide.add(pairs[i], r.divided, quotient);
    const float size = std::abs(b);
    if (!(size < 1 / kModerate)) normal.add(pairs[i], r.by_normal, quotient);
    if (!(size < 1 / kModerate) && !(size > kModerate) && !(std::abs(a) > kModerate))
      moderate.add(pairs[i], r.moderate, quotient);
    maximum.add(pairs[i], r.maximum, std::isnan(b) ? b : larger(a, b));
    minimum.add(pairs[i], r.minimum, std::isnan(b) ? b : smaller(a, b));
    relu.add(pairs[i], r.relu, a <= 0 ? 0.f : a);
  }
  long wrong = 0;
  for (const Tally& t : {divide, normal, moderate, maximum, minimum, relu}) {
    std::printf("%-17s %9ld pairs, worst %.2f units in the last place\n", t.name, t.count, t.worst);
    wrong += t.wrong;
  }
  std::printf("%ld wrong\n", wrong);
  return wrong ? 1 : 0;
}
