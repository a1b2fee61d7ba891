// Packing of transposed operands, contiguous in the row index instead of in k, 128 bytes at a time:
// lines of split.cuh (32 of k as hi and lo halves) or of scaled_rows.cuh (64 of k, one half each),
// or 32 of k as crossed_rows.cuh deals them out.
//
// A strip of 32 rows belongs to a block, or to a cluster of blocks that deal its lines among their
// warps. A lane owns a row: a load of a warp is 32 rows of one k, 128 bytes. A warp keeps its lines
// as fp32, kRegisters of them in registers and kShared in shared memory, until the strip's maxima
// are known: the source is read once. With no registers given a strip may be of any length and is
// read twice. Packed lines then cross shared memory, where 16-byte pieces of row r stand at piece
// ^ (r & 7), so that neither side has bank conflicts and eight lanes store a whole line.
//
// Launch: 32 · kWarps threads; divide_up(rows, 32) clusters of up to kMostBlocks blocks, of which
// compute capabilities below 9.0 know only one; pack_columns_bytes() of dynamic shared memory.
#pragma once

#include "product/pack_args.cuh"
#include "product/scale.cuh"

namespace ingot {

// slabs: of 32 k, in a line.
INGOT_HD constexpr int pack_columns_bytes(int warps, int slabs, int registers, int shared) {
  return warps * 4096 * (registers > 0 && shared > 0 ? shared * slabs : 1);
}

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

// Around all that a packing kernel reads and writes. One that runs beside its predecessor waits for
// it at the end: who waits for this kernel has waited for both.
INGOT_D void begin_packing(const SplitArgs& args) {
  if (args.beside == 0) ptx::dependency_wait();
  ptx::launch_dependents();
}
INGOT_D void end_packing(const SplitArgs& args) {
  if (args.beside != 0) ptx::dependency_wait();
}

namespace columns {

inline constexpr int kMostBlocks = 16;

// A strip as a lane sees it.
struct Strip {
  const float* source;  // of the lane's row
  i64 k_stride;
  i32 k, rows;            // rows: from the strip's first on
  i32 lines;              // of a row
  u32* packed;            // of the strip's first row
  i32* exponent;          // of the lane's row
  i32 lane, first, step;  // the warp's first line, and on to its next
  bool valid;             // the lane's row exists
};

// kCount elements from `first` on, zero past the end.
template <int kCount>
INGOT_D void load(const Strip& strip, i32 first, float* v) {
  const float* p = strip.source + first * strip.k_stride;
  const i32 left = strip.valid ? strip.k - first : 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i, p += strip.k_stride) v[i] = i < left ? *p : 0.f;
}

// The same into shared memory, 128 bytes of it for each k; complete after copy_wait_all().
template <int kCount>
INGOT_D void copy(const Strip& strip, i32 first, u32 lane_address) {
  const float* p = strip.source + first * strip.k_stride;
  const i32 left = strip.valid ? strip.k - first : 0;
#pragma unroll 16
  for (int i = 0; i < kCount; ++i, p += strip.k_stride) {
    ptx::copy_word_async(lane_address + i * 128, p, i < left);
  }
}

template <int kCount>
INGOT_D float maximum(float m, const float* v) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) m = fmaxf(m, fabsf(v[i]));
  return m;
}

// Eight halves of this lane's row, at piece `piece` of its line.
INGOT_D void store_piece(u32 memory, i32 lane, int piece, const u32 (&word)[4]) {
  ptx::store_shared_words(memory + lane * 128 + ((piece ^ (lane & 7)) * 16),
                          uint4{word[0], word[1], word[2], word[3]});
}

// What a line is packed into: 32 · kSlabs of k as the fragments want them, hi and lo halves (one
// slab) or halves (two). Another form is in crossed_rows.cuh.
template <int kSlabs_>
struct FragmentForm {
  static constexpr int kSlabs = kSlabs_;
  static constexpr i32 kTarget = kExactTarget;

  INGOT_D static i32 lines(i32 k) { return (k + 32 * kSlabs - 1) / (32 * kSlabs); }
  // Slab `slab` of this lane's row into its line. Pieces are of eight values: pair c of piece q is
  // elements 8c + 4(q / 2) + 2(q % 2) and the next.
  INGOT_D static void pack(const float* v, float scale, int slab, u32 memory, i32 lane) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      u32 hi[4], lo[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int i = 8 * c + 4 * (q / 2) + 2 * (q % 2);
        if constexpr (kSlabs == 1) {
          split_pair(v[i], v[i + 1], scale, hi[c], lo[c]);
        } else {
          hi[c] = ptx::pack_half2(v[i] * scale, v[i + 1] * scale);
        }
      }
      store_piece(memory, lane, 4 * slab + q, hi);
      if constexpr (kSlabs == 1) store_piece(memory, lane, 4 + q, lo);
    }
  }
  // Where a piece of a line belongs in a packed row of `lines`: its first word.
  INGOT_D static i32 place(i32 line, i32 piece, i32) {
    return line * 32 + piece * 4;
  }
};

// Line `line` of 32 rows from shared memory to where it belongs, eight lanes a row.
template <class Form>
INGOT_D void flush(const Strip& strip, u32 memory, i32 line) {
  __syncwarp();
  const i32 piece = strip.lane & 7;
  u32* packed = strip.packed + Form::place(line, piece, strip.lines);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const i32 row = 4 * i + (strip.lane >> 3);
    const uint4 words = ptx::load_shared_words(memory + row * 128 + ((piece ^ (row & 7)) * 16));
    if (row < strip.rows) {
      *reinterpret_cast<uint4*>(packed + static_cast<i64>(row) * strip.lines * 32) = words;
    }
  }
  __syncwarp();
}

INGOT_D u32 blocks_of_strip() {
#if __CUDA_ARCH__ >= 900
  return ptx::cluster_blocks();
#else
  return 1;
#endif
}
INGOT_D u32 block_of_strip() {
#if __CUDA_ARCH__ >= 900
  return ptx::cluster_rank();
#else
  return 0;
#endif
}

// Maxima meet here: of a block's warps, then of the strip's blocks.
template <int kWarps>
struct Meeting {
  float warps[kWarps][32], blocks[kMostBlocks][32];
  u64 barrier;
};

// By all threads; strip_maximum() then finds the other blocks running.
template <int kWarps>
INGOT_D void open_meeting(Meeting<kWarps>& meeting, u32 blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks == 1) return;
  if (threadIdx.x == 0) {
    const u32 barrier = ptx::shared_address(&meeting.barrier);
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_expect_bytes(barrier, blocks * 128);
  }
  __syncwarp();
  ptx::cluster_arrive();
#endif
}

template <int kWarps>
INGOT_D float strip_maximum(float m, Meeting<kWarps>& meeting, u32 blocks) {
  const i32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  meeting.warps[warp][lane] = m;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) m = fmaxf(m, meeting.warps[i][lane]);
#if __CUDA_ARCH__ >= 900
  if (blocks == 1) return m;
  ptx::cluster_wait();
  const u32 barrier = ptx::shared_address(&meeting.barrier);
  for (u32 block = warp; block < blocks; block += kWarps) {
    ptx::store_shared_remote(ptx::shared_address(&meeting.blocks[block_of_strip()][lane]), barrier,
                             block, m);
  }
  ptx::mbarrier_wait(barrier, 0);
  for (u32 block = 0; block < blocks; ++block) m = fmaxf(m, meeting.blocks[block][lane]);
#endif
  return m;
}

// The strip's scale of the lane's row.
template <class Form, int kWarps>
INGOT_D float strip_scale(const Strip& strip, float amax, Meeting<kWarps>& meeting, u32 blocks) {
  const i32 exponent = scale_exponent(strip_maximum(amax, meeting, blocks), Form::kTarget);
  if (strip.first == 0 && strip.valid) *strip.exponent = exponent;
  return pow2(-exponent);
}

// Lines first + i · step, the first of them in registers, the others in shared memory.
template <class Form, int kWarps, int kRegisters, int kShared>
INGOT_D void pack_kept(const Strip& strip, u32 memory, Meeting<kWarps>& meeting, u32 blocks) {
  constexpr int kSlabs = Form::kSlabs, kLine = 32 * kSlabs;
  const u32 own = memory + strip.lane * 4;
  float v[kRegisters * kLine];
#pragma unroll
  for (int i = 0; i < kShared; ++i) {
    const i32 line = strip.first + (kRegisters + i) * strip.step;
    if (line < strip.lines) copy<kLine>(strip, line * kLine, own + i * kLine * 128);
  }
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    load<kLine>(strip, (strip.first + i * strip.step) * kLine, v + i * kLine);
  }
  float amax = maximum<kRegisters * kLine>(0.f, v);
  __syncwarp();          // else loads sink below the wait, and memory is waited for twice
  ptx::copy_wait_all();  // a lane reads back what it copied itself
#pragma unroll
  for (int i = 0; i < kShared; ++i) {
    if (strip.first + (kRegisters + i) * strip.step >= strip.lines) break;
#pragma unroll
    for (int e = 0; e < kLine; ++e) {
      amax = fmaxf(amax, fabsf(ptx::load_shared(own + (i * kLine + e) * 128)));
    }
  }
  const float scale = strip_scale<Form>(strip, amax, meeting, blocks);
#pragma unroll
  for (int i = 0; i < kShared; ++i) {
    const i32 line = strip.first + (kRegisters + i) * strip.step;
    if (line >= strip.lines) break;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      float w[32];
#pragma unroll
      for (int e = 0; e < 32; ++e) {
        w[e] = ptx::load_shared(own + (i * kLine + slab * 32 + e) * 128);
      }
      __syncwarp();  // packed lines take the first slab's place
      Form::pack(w, scale, slab, memory + i * kLine * 128, strip.lane);
    }
    flush<Form>(strip, memory + i * kLine * 128, line);
  }
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) {
    const i32 line = strip.first + i * strip.step;
    if (line >= strip.lines) break;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      Form::pack(v + i * kLine + slab * 32, scale, slab, memory, strip.lane);
    }
    flush<Form>(strip, memory, line);
  }
}

template <class Form, int kWarps>
INGOT_D void pack_long(const Strip& strip, u32 memory, Meeting<kWarps>& meeting, u32 blocks) {
  constexpr int kSlabs = Form::kSlabs;
  float v[32], amax = 0.f;
  for (i32 line = strip.first; line < strip.lines; line += strip.step) {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      load<32>(strip, (line * kSlabs + slab) * 32, v);
      amax = maximum<32>(amax, v);
    }
  }
  const float scale = strip_scale<Form>(strip, amax, meeting, blocks);
  for (i32 line = strip.first; line < strip.lines; line += strip.step) {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      load<32>(strip, (line * kSlabs + slab) * 32, v);
      Form::pack(v, scale, slab, memory, strip.lane);
    }
    flush<Form>(strip, memory, line);
  }
}

}  // namespace columns

template <class Form, int kWarps, int kRegisters, int kShared>
INGOT_D void pack_columns(const SplitArgs& args) {
  extern __shared__ __align__(128) unsigned char column_memory[];
  __shared__ columns::Meeting<kWarps> meeting;
  const u32 blocks = columns::blocks_of_strip();
  columns::open_meeting(meeting, blocks);
  const i32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const i32 first_row = static_cast<i32>(blockIdx.x / blocks) * 32, row = first_row + lane;
  const i32 lines = Form::lines(args.k);
  const columns::Strip strip = {
      source_row(args, row),
      args.k_stride,
      args.k,
      args.rows - first_row,
      lines,
      static_cast<u32*>(args.packed) + static_cast<i64>(first_row) * lines * 32,
      args.exponent + row,
      lane,
      static_cast<i32>(columns::block_of_strip()) * kWarps + warp,
      static_cast<i32>(blocks) * kWarps,
      row < args.rows};
  constexpr i32 kOwnBytes = pack_columns_bytes(1, Form::kSlabs, kRegisters, kShared);
  const u32 own = ptx::shared_address(column_memory) + warp * kOwnBytes;
  begin_packing(args);
  if constexpr (kRegisters > 0) {
    columns::pack_kept<Form, kWarps, kRegisters, kShared>(strip, own, meeting, blocks);
  } else {
    columns::pack_long<Form>(strip, own, meeting, blocks);
  }
  end_packing(args);
}

#endif

}  // namespace ingot
