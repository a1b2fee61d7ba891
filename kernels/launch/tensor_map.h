// Matrices as Hopper's copy engine is told of them. One text for the library, standalone files and
// bench/hopper. Plain C++: numbers are those of cuda.h.
#pragma once

#include <cstdint>

namespace ingot::hopper {

// Of matrices in memory. fp32 products are made from fp16 halves, the others from what is there.
enum class Element { f32, f16, bf16 };

inline int size_of(Element element) {
  return element == Element::f32 ? 4 : 2;
}

// A matrix, with the 128-byte swizzle and element strides of one.
struct TensorMapSpec {
  Element element = Element::f32;
  uint64_t columns = 0, rows = 0;
  uint64_t row_bytes = 0;  // multiple of 16
  uint32_t box_columns = 0, box_rows = 0;
  enum class Source { w, x, y, x_packed, w_packed } source = Source::w;
  // Rows, a multiple of eight, as three dimensions: which half of eight they lie in, which eight,
  // which of the half's four. Row 8c + 4j + i of a box of 32 is then its line 8i + 2c + j.
  bool eights = false;
  // Of a batch: matrices like this one, and the bytes between them (a multiple of 16). 0: one, and
  // no dimension for it.
  uint64_t entries = 0, entry_bytes = 0;
};

// Of fp32 as it lies in memory: an operand, the result.
inline TensorMapSpec matrix_map(int64_t columns, int64_t rows, int64_t row_elements, int box_rows) {
  return {Element::f32, uint64_t(columns), uint64_t(rows), uint64_t(row_elements) * 4,
          32,           uint32_t(box_rows)};
}
// Of a weight that is contiguous in its features.
inline TensorMapSpec columns_map(int64_t features, int64_t k, int64_t k_elements) {
  TensorMapSpec spec = matrix_map(features, k, k_elements, 32);
  spec.eights = true;
  return spec;
}
// Of a packed operand.
inline TensorMapSpec packed_map(int64_t row_bytes, int64_t rows, int box_rows) {
  return {Element::f16, uint64_t(row_bytes) / 2, uint64_t(rows), uint64_t(row_bytes),
          64,           uint32_t(box_rows)};
}

// What the driver is told of one.
struct TensorMapExtents {
  int rank = 2;
  uint64_t extents[5] = {}, strides[4] = {};  // bytes, from the second dimension on
  uint32_t box[5] = {}, steps[5] = {1, 1, 1, 1, 1};
};

inline TensorMapExtents extents_of(const TensorMapSpec& spec) {
  const uint64_t row = spec.row_bytes;
  TensorMapExtents of = {2, {spec.columns, spec.rows}, {row}, {spec.box_columns, spec.box_rows}};
  if (spec.eights) {
    of = {4,
          {spec.columns, 2, spec.rows / 8, 4},
          {4 * row, 8 * row, row},
          {spec.box_columns, 2, spec.box_rows / 8, 4}};
  }
  if (spec.entries > 0) {
    of.extents[of.rank] = spec.entries;
    of.strides[of.rank - 1] = spec.entry_bytes;
    of.box[of.rank++] = 1;
  }
  return of;
}

// cuTensorMapEncodeTiled.
template <class Map>
using EncodeTiled = int (*)(Map*, int, uint32_t, void*, const uint64_t*, const uint64_t*,
                            const uint32_t*, const uint32_t*, int, int, int, int);

// Gives CUDA's status.
template <class Map>
int encode_map(Map* map, EncodeTiled<Map> encode, const TensorMapSpec& spec, void* base) {
  constexpr int kF32 = 7, kF16 = 6, kBf16 = 9, kSwizzle128 = 3, kPromote256 = 3;
  const int type = spec.element == Element::f32   ? kF32
                   : spec.element == Element::f16 ? kF16
                                                  : kBf16;
  const TensorMapExtents of = extents_of(spec);
  return encode(map, type, uint32_t(of.rank), base, of.extents, of.strides, of.box, of.steps, 0,
                kSwizzle128, kPromote256, 0);
}

}  // namespace ingot::hopper
