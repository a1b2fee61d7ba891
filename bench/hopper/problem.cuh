// Inputs, fp64 truth and error measures for the product's checks and timings.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "device.cuh"

namespace bench {

__host__ __device__ inline unsigned hash(unsigned long long i, unsigned seed) {
  unsigned long long z =
      i * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull + 0x632BE59BD9B4E019ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return unsigned(z >> 32);
}

// What the elements of a matrix look like; row r, column k.
enum class Data {
  uniform01,  // torch.rand
  weight,     // U(±1/√k): nn.Linear's initial weight
  normal,
  wide_rows,      // rows scaled by 2^±60
  wide_chunks,    // blocks of 64 of k scaled by 2^±30
  wide_elements,  // elements scaled by 2^±20
  growing,        // magnitude doubles every 64 of k
  zero_start,     // first 64, 200 or all of a row zero, by row
  denormal,       // around 2^-140
  huge,           // around 2^120
  tiny,           // around 2^-120
  special,        // a few Inf, −Inf and NaN
  large_mean,     // 1000 + U(0,1)
  outlier,        // one element of a row 2^16 above the others
  constant,       // 1/3: all roundings go the same way
};

__device__ inline float element(Data data, long long row, long long k, long long width,
                                unsigned seed) {
  const unsigned long long index = row * width + k;
  const float u = (hash(index, seed) >> 8) * (1.f / 16777216.f);
  const float centred = 2.f * u - 1.f;
  const auto power = [&](unsigned long long i, int span) {
    return ldexpf(centred, int(hash(i, seed + 77) % (2 * span + 1)) - span);
  };
  switch (data) {
    case Data::uniform01:
      return u;
    case Data::weight:
      return centred * rsqrtf(float(width));
    case Data::normal: {
      const float v = ((hash(index, seed + 1) >> 8) + 1) * (1.f / 16777217.f);
      return sqrtf(-2.f * logf(v)) * cospif(2.f * u);
    }
    case Data::wide_rows:
      return power(row, 60);
    case Data::wide_chunks:
      return power(row * 65536 + k / 64, 30);
    case Data::wide_elements:
      return power(index, 20);
    case Data::growing:
      return ldexpf(centred, int(k / 64) % 100 - 50);
    case Data::zero_start:
      return k < (row % 3 == 0 ? 64 : row % 3 == 1 ? 200 : width) ? 0.f : centred;
    case Data::denormal:
      return ldexpf(centred, -140);
    case Data::huge:
      return ldexpf(centred, 120);
    case Data::tiny:
      return ldexpf(centred, -120);
    case Data::special: {
      const unsigned h = hash(index, seed + 9) % 20011;
      return h == 0 ? INFINITY : h == 1 ? -INFINITY : h == 2 ? NAN : centred;
    }
    case Data::large_mean:
      return 1000.f + u;
    case Data::outlier:
      return k == hash(row, seed + 5) % width ? ldexpf(centred, 16) : centred;
    case Data::constant:
      return 1.f / 3;
  }
  return 0.f;
}

__global__ void fill(float* p, long long rows, long long width, long long row_stride,
                     long long k_stride, Data data, unsigned seed) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < rows * width;
       i += (long long)gridDim.x * blockDim.x) {
    p[i / width * row_stride + i % width * k_stride] =
        element(data, i / width, i % width, width, seed);
  }
}

// Sampled indices: spread out, first and last included.
__host__ __device__ inline long long sample_index(int i, int samples, long long count) {
  if (samples >= count) return i;
  if (i == samples - 1) return count - 1;
  const long long step = count / samples;
  return i * step + (i ? hash(i, 5) % step : 0);
}

// The promise's unit; half a denormal step is no error of ours.
__device__ inline double error_unit(const ErrorBound& bound, double products, double max_x,
                                    double sum_x, double max_w, double sum_w) {
  return bound.roundoff * products + bound.range_floor * (max_x * sum_w + max_w * sum_x) + 0x1p-149;
}

// truth[i·columns + j] and the unit its error is measured in, one warp each.
__global__ void reference(OperandView x, OperandView w, long long m, long long n, int k, int rows,
                          int columns, ErrorBound bound, double* truth, double* unit) {
  const int id = (blockIdx.x * blockDim.x + threadIdx.x) >> 5, lane = threadIdx.x & 31;
  if (id >= rows * columns) return;
  const float* a = x.data + sample_index(id / columns, rows, m) * x.row_stride;
  const float* b = w.data + sample_index(id % columns, columns, n) * w.row_stride;
  double sum = 0, total = 0, sum_x = 0, sum_w = 0, max_x = 0, max_w = 0;
  for (int i = lane; i < k; i += 32) {
    const double u = a[i * x.k_stride], v = b[i * w.k_stride];
    sum += u * v;
    total += fabs(u * v);
    sum_x += fabs(u), sum_w += fabs(v);
    max_x = fmax(max_x, fabs(u)), max_w = fmax(max_w, fabs(v));
  }
  for (int o = 16; o; o >>= 1) {
    sum += __shfl_xor_sync(~0u, sum, o);
    total += __shfl_xor_sync(~0u, total, o);
    sum_x += __shfl_xor_sync(~0u, sum_x, o);
    sum_w += __shfl_xor_sync(~0u, sum_w, o);
    max_x = fmax(max_x, __shfl_xor_sync(~0u, max_x, o));
    max_w = fmax(max_w, __shfl_xor_sync(~0u, max_w, o));
  }
  if (lane == 0) {
    truth[id] = sum;
    unit[id] = error_unit(bound, total, max_x, sum_x, max_w, sum_w);
  }
}

__global__ void gather(const float* y, long long stride, long long m, long long n, int rows,
                       int columns, float* out) {
  const int id = blockIdx.x * blockDim.x + threadIdx.x;
  if (id < rows * columns) {
    out[id] =
        y[sample_index(id / columns, rows, m) * stride + sample_index(id % columns, columns, n)];
  }
}

// Order-independent hash of all words, and the number of NaNs.
__global__ void digest(const unsigned* y, long long count, unsigned long long* out) {
  unsigned long long sum = 0, nans = 0;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count;
       i += (long long)gridDim.x * blockDim.x) {
    sum += y[i] * (2 * (((unsigned long long)i * 0x9E3779B97F4A7C15ull) >> 20) + 1);
    nans += (y[i] & 0x7fffffffu) > 0x7f800000u;
  }
  atomicAdd(out, sum);
  atomicAdd(out + 1, nans);
}

// Partial statistics of a feature, at most: a tile of 64 samples may be shared by 8 slices of K.
inline size_t most_moment_tiles(int64_t m) {
  return size_t(divide_up(m, 64)) * 8;
}

struct Errors {
  double frobenius = 0, worst_row = 0, units = 0;  // the last: worst error over error_unit()
  long long class_mismatches = 0;                  // NaN, ±Inf or finite elsewhere than truth
};

// truth_of(sum, m, n) applies the epilogue's arithmetic to the exact product.
struct Problem {
  ProductShape shape;
  float *x = nullptr, *w = nullptr, *y = nullptr;
  Moments<float>::State* partials = nullptr;
  unsigned char* workspace = nullptr;
  size_t workspace_bytes = 0, y_count = 0;
  int rows = 0, columns = 0;
  double *truth = nullptr, *unit = nullptr;
  float* sampled = nullptr;
  unsigned long long* digest_words = nullptr;
  std::vector<double> host_truth, host_unit;

  Problem(const ProductShape& s, Data x_data, Data w_data, size_t workspace_need, int misalign = 0)
      : shape(s), workspace_bytes(workspace_need) {
    const auto extent = [](int64_t r, int64_t k, const OperandShape& o) {
      return size_t((r - 1) * o.row_stride + (k - 1) * o.k_stride + 1) + 8;
    };
    CHECK(cudaMalloc(&x, extent(s.m, s.k, s.x) * 4));
    CHECK(cudaMalloc(&w, extent(s.n, s.k, s.w) * 4));
    x_base = x, w_base = w;
    x += misalign, w += misalign;
    y_count = size_t(s.m) * size_t(s.y_stride);
    CHECK(cudaMalloc(&y, y_count * 4 + 64));
    y_base = y;
    y += s.y_aligned ? 0 : 1;
    CHECK(cudaMalloc(&partials, most_moment_tiles(s.m) * size_t(s.n) * sizeof(*partials) * 2));
    CHECK(cudaMalloc(&workspace, workspace_bytes));
    rows = int(std::min<int64_t>(s.m, 64)), columns = int(std::min<int64_t>(s.n, 512));
    CHECK(cudaMalloc(&truth, size_t(rows * columns) * 8));
    CHECK(cudaMalloc(&unit, size_t(rows * columns) * 8));
    CHECK(cudaMalloc(&sampled, size_t(rows * columns) * 4));
    CHECK(cudaMalloc(&digest_words, 16));
    fill<<<1024, 256>>>(x, s.m, s.k, s.x.row_stride, s.x.k_stride, x_data, 1);
    fill<<<1024, 256>>>(w, s.n, s.k, s.w.row_stride, s.w.k_stride, w_data, 2);
    const int threads = rows * columns * 32;
    reference<<<(threads + 255) / 256, 256>>>(
        {x, s.x.row_stride, s.x.k_stride}, {w, s.w.row_stride, s.w.k_stride}, s.m, s.n, int(s.k),
        rows, columns, scheme_of(s.scheme).bound, truth, unit);
    host_truth.resize(size_t(rows * columns)), host_unit.resize(host_truth.size());
    CHECK(cudaMemcpy(host_truth.data(), truth, host_truth.size() * 8, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(host_unit.data(), unit, host_truth.size() * 8, cudaMemcpyDeviceToHost));
  }
  Problem(const Problem&) = delete;
  ~Problem() {
    for (void* p : {(void*)x_base, (void*)w_base, (void*)y_base, (void*)partials, (void*)workspace,
                    (void*)truth, (void*)unit, (void*)sampled, (void*)digest_words}) {
      cudaFree(p);
    }
  }

  Buffers buffers() const {
    Buffers b;
    b.x = x, b.w = w, b.y = y, b.workspace = workspace;
    b.partials[0] = partials;
    b.partials[1] = partials + most_moment_tiles(shape.m) * size_t(shape.n);
    return b;
  }
  // NaN everywhere: what a kernel forgets to write shows.
  void poison() const {
    CHECK(cudaMemset(y_base, 0xff, y_count * 4 + 64));
    CHECK(cudaMemset(partials, 0xff,
                     most_moment_tiles(shape.m) * size_t(shape.n) * sizeof(*partials) * 2));
    CHECK(cudaMemset(workspace, 0xff, workspace_bytes));
  }
  std::pair<unsigned long long, unsigned long long> digest_result() const {
    unsigned long long words[2];
    CHECK(cudaMemset(digest_words, 0, 16));
    digest<<<512, 256>>>((const unsigned*)y, (long long)y_count, digest_words);
    CHECK(cudaMemcpy(words, digest_words, 16, cudaMemcpyDeviceToHost));
    return {words[0], words[1]};
  }
  // Where a result is not finite, or ought not to be. `slack` is what the promise leaves to a sum:
  // one that overflows may take the other sign within it.
  static bool same_class(double truth, double got, double slack) {
    if (std::isnan(float(truth))) return std::isnan(got);
    for (const double t : {truth, truth - slack, truth + slack}) {
      if (double(float(t)) == got) return true;
    }
    return false;
  }
  template <class Finish>
  Errors errors(Finish finish, double unit_limit = 0) const {
    std::vector<float> got(host_truth.size());
    gather<<<(rows * columns + 255) / 256, 256>>>(y, shape.y_stride, shape.m, shape.n, rows,
                                                  columns, sampled);
    CHECK(cudaMemcpy(got.data(), sampled, got.size() * 4, cudaMemcpyDeviceToHost));
    Errors e;
    double all_error = 0, all_truth = 0;
    for (int r = 0; r < rows; ++r) {
      double row_error = 0, row_truth = 0;
      for (int c = 0; c < columns; ++c) {
        const size_t i = size_t(r * columns + c);
        const double t = finish(host_truth[i], sample_index(r, rows, shape.m),
                                sample_index(c, columns, shape.n));
        const double v = got[i];
        const float rounded = float(t);  // overflow to infinity is what fp32 does
        if (!std::isfinite(rounded) || !std::isfinite(v)) {
          e.class_mismatches += !same_class(t, v, unit_limit * host_unit[i]);
          continue;
        }
        row_error += (v - t) * (v - t);
        row_truth += t * t;
        e.units = std::max(e.units, std::fabs(v - t) / host_unit[i]);
      }
      all_error += row_error, all_truth += row_truth;
      if (row_truth > 0) e.worst_row = std::max(e.worst_row, std::sqrt(row_error / row_truth));
    }
    e.frobenius = all_truth > 0 ? std::sqrt(all_error / all_truth) : std::sqrt(all_error);
    return e;
  }

 private:
  float *x_base = nullptr, *w_base = nullptr, *y_base = nullptr;
};

inline ProductShape row_major(int64_t m, int64_t n, int64_t k) {
  ProductShape s;
  s.m = m, s.n = n, s.k = k;
  s.x = {k, 1, true}, s.w = {k, 1, true};
  s.y_stride = n;
  return s;
}

}  // namespace bench
