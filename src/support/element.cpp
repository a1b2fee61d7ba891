#include "support/element.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace ingot {
namespace {

template <class T>
T load_as(const void* data, int64_t index) {
  T value;  // copied: the caller's pointer need not be aligned
  std::memcpy(&value, static_cast<const char*>(data) + index * int64_t{sizeof(T)}, sizeof(T));
  return value;
}

template <class T>
void store_as(void* data, int64_t index, T value) {
  std::memcpy(static_cast<char*>(data) + index * int64_t{sizeof(T)}, &value, sizeof(T));
}

double from_half(uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f;
  const int mantissa = bits & 0x3ff;
  double magnitude;
  if (exponent == 0x1f) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, -24);
  } else {
    magnitude = std::ldexp(mantissa + 0x400, exponent - 25);
  }
  return bits & 0x8000 ? -magnitude : magnitude;
}

// Rounds a magnitude to `digits` significant bits, none of them below 2^lowest.
double round_to(double magnitude, int digits, int lowest) {
  if (magnitude == 0 || !std::isfinite(magnitude)) return magnitude;
  const int unit = std::max(std::ilogb(magnitude) - (digits - 1), lowest);
  return std::ldexp(std::nearbyint(std::ldexp(magnitude, -unit)), unit);
}

uint16_t to_half(double value) {
  const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000 : 0);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00);
  const double rounded = round_to(std::fabs(value), 11, -24);
  if (rounded >= 0x1p16) return static_cast<uint16_t>(sign | 0x7c00);
  if (rounded < 0x1p-14) return static_cast<uint16_t>(sign | int(std::ldexp(rounded, 24)));
  const int exponent = std::ilogb(rounded);
  const int mantissa = static_cast<int>(std::ldexp(rounded, 10 - exponent)) - 0x400;
  return static_cast<uint16_t>(sign | ((exponent + 15) << 10) | mantissa);
}

double from_bfloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

uint16_t to_bfloat(double value) {
  if (std::isnan(value)) return 0x7fc0;
  const double rounded = std::copysign(round_to(std::fabs(value), 8, -133), value);
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(rounded)) >> 16);
}

int64_t to_integer(double value) {
  const bool fits = value >= -0x1p63 && value < 0x1p63;
  return fits ? static_cast<int64_t>(value) : std::numeric_limits<int64_t>::min();
}

}  // namespace

int64_t element_size(int32_t dtype) {
  switch (dtype) {
    case INGOT_F32:
      return 4;
    case INGOT_F64:
    case INGOT_I64:
      return 8;
    case INGOT_F16:
    case INGOT_BF16:
      return 2;
    case INGOT_BOOL:
      return 1;
    default:
      return 0;
  }
}

double load_element(const void* data, int32_t dtype, int64_t index) {
  switch (dtype) {
    case INGOT_F32:
      return load_as<float>(data, index);
    case INGOT_F64:
      return load_as<double>(data, index);
    case INGOT_F16:
      return from_half(load_as<uint16_t>(data, index));
    case INGOT_BF16:
      return from_bfloat(load_as<uint16_t>(data, index));
    case INGOT_I64:
      return static_cast<double>(load_as<int64_t>(data, index));
    default:
      return load_as<uint8_t>(data, index) != 0 ? 1 : 0;
  }
}

void store_element(void* data, int32_t dtype, int64_t index, double value) {
  switch (dtype) {
    case INGOT_F32:
      return store_as(data, index, static_cast<float>(value));
    case INGOT_F64:
      return store_as(data, index, value);
    case INGOT_F16:
      return store_as(data, index, to_half(value));
    case INGOT_BF16:
      return store_as(data, index, to_bfloat(value));
    case INGOT_I64:
      return store_as(data, index, to_integer(value));
    default:
      return store_as(data, index, static_cast<uint8_t>(value != 0));
  }
}

}  // namespace ingot
