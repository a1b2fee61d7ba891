#include "verify/measures.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "support/element.h"
#include "support/error.h"

namespace ingot {
namespace {

constexpr double kTolerance = 1e-4;  // absolute and relative alike, as KernelBench has it

// Sums over a row or over everything. Extended precision also has the range for squares of any
// double.
struct Sums {
  long double error_squares = 0, truth_squares = 0;
  double largest_error = 0, largest_truth = 0;
  bool differs = false;

  void add(double truth, double candidate) {
    const long double error = static_cast<long double>(candidate) - truth;
    error_squares += error * error;
    truth_squares += static_cast<long double>(truth) * truth;
    largest_error = std::max(largest_error, static_cast<double>(std::fabs(error)));
    largest_truth = std::max(largest_truth, std::fabs(truth));
  }
  void add(const Sums& row) {
    error_squares += row.error_squares;
    truth_squares += row.truth_squares;
    largest_error = std::max(largest_error, row.largest_error);
    largest_truth = std::max(largest_truth, row.largest_truth);
    differs = differs || row.differs;
  }
};

double quotient(long double error, long double truth, bool differs) {
  if (differs) return std::numeric_limits<double>::infinity();
  return error == 0 ? 0 : static_cast<double>(error / truth);  // x / 0 is infinite
}

double relative_norm(const Sums& sums) {
  return quotient(std::sqrt(sums.error_squares), std::sqrt(sums.truth_squares), sums.differs);
}

bool alike(double truth, double candidate) {
  return std::isnan(truth) ? std::isnan(candidate) : truth == candidate;
}

void check(const double* truth, const void* candidate, int32_t dtype, int64_t rows,
           int64_t columns) {
  if (rows < 0 || columns < 0) {
    fail(INGOT_INVALID_ARGUMENT, "cannot measure {} rows of {} columns", rows, columns);
  }
  if (element_size(dtype) == 0) fail(INGOT_INVALID_ARGUMENT, "there is no dtype {}", dtype);
  if (rows != 0 && columns != 0 && (truth == nullptr || candidate == nullptr)) {
    fail(INGOT_INVALID_ARGUMENT, "truth and candidate must point to data");
  }
}

}  // namespace

ErrorMeasures measure_error(const double* truth, const void* candidate, int32_t dtype, int64_t rows,
                            int64_t columns) {
  check(truth, candidate, dtype, rows, columns);
  ErrorMeasures measures;
  Sums all;
  for (int64_t row = 0; row < rows; ++row) {
    Sums sums;
    for (int64_t i = row * columns; i < (row + 1) * columns; ++i) {
      const double expected = truth[i], value = load_element(candidate, dtype, i);
      if (std::isfinite(expected) && std::isfinite(value)) {
        sums.add(expected, value);
        const double bound = kTolerance + kTolerance * std::fabs(expected);
        measures.mismatches += std::fabs(value - expected) > bound;
      } else if (!alike(expected, value)) {
        sums.differs = true;
        ++measures.non_finite_differs;
        ++measures.mismatches;
      }
    }
    measures.worst_row = std::max(measures.worst_row, relative_norm(sums));
    all.add(sums);
  }
  measures.frobenius = relative_norm(all);
  measures.largest = quotient(all.largest_error, all.largest_truth, all.differs);
  return measures;
}

}  // namespace ingot
