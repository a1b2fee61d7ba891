"""Errors as people make them, a line each, which the quick checks must find (run.py tries them).

Each is put in one at a time. `seen_by` names the part of the quick checks that should fail: a
GoogleTest filter (run in the release build, or under the sanitizers), the arguments of pytest, or a
stage of tools/check.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    name: str
    file: str
    old: str  # occurs once in the file
    new: str
    seen_by: str  # "asan FILTER", "python ARGUMENTS" or "stage NAME"


BUGS = [
    # src/graph
    Bug(
        "an argument may be the value itself",
        "src/graph/inference.cpp",
        "arg < 0 || static_cast<size_t>(arg) >= id",
        "arg < 0 || static_cast<size_t>(arg) > id",
        "asan Graph.*:Importer.*:Builder.*",
    ),
    Bug(
        "a result may be one past the last value",
        "src/graph/inference.cpp",
        "value < 0 || static_cast<size_t>(value) >= graph.nodes.size()",
        "value < 0 || static_cast<size_t>(value) > graph.nodes.size()",
        "asan Graph.*",
    ),
    Bug(
        "a product of f16 with bf16 is f16",
        "src/graph/inference.cpp",
        "return DType::f64;\n  return DType::f32;",
        "return DType::f64;\n  return a;",
        "python tests/python/test_evaluator_against_torch.py",
    ),
    # src/rewrite
    Bug(
        "x − (−0) counts as x",
        "src/rewrite/neutral_operands.cpp",
        "return is_number(edit, b, 0) && !__builtin_signbit(edit[b].constant) ? a : kNoValue;",
        "return is_number(edit, b, 0) ? a : kNoValue;",
        "asan Rewrite*",
    ),
    Bug(
        "x·W and x·Wᵀ are one value",
        "src/rewrite/common_subexpressions.cpp",
        "a.args.size() != b.args.size() || a.transpose_b != b.transpose_b || a.op != b.op ||",
        "a.args.size() != b.args.size() || a.op != b.op ||",
        "asan Rewrite*",
    ),
    Bug(
        "subtracting a constant turns a maximum into a minimum",
        "src/rewrite/monotone_reductions.cpp",
        "scale && c < 0 ? turned",
        "c < 0 ? turned",
        "asan Rewrite*",
    ),
    Bug(
        "r − x counts as x − r",
        "src/rewrite/shift_invariance.cpp",
        "if (left.op == PointwiseOp::sub_ && (i == 0 || j == 0)) continue;",
        "if (left.op == PointwiseOp::sub_ && i == 0 && j != 0) continue;",
        "asan Rewrite*",
    ),
    Bug(
        "any division by a constant becomes a product",
        "src/rewrite/merge_constants.cpp",
        "if (node.op == PointwiseOp::div_ && is_power_of_two(c) && is_normal_f32(1 / c)) {",
        "if (node.op == PointwiseOp::div_ && is_normal_f32(1 / c)) {",
        "asan Rewrite*",
    ),
    # src/plan
    Bug(
        "an epilogue keeps the first of two results that do not follow from one another",
        "src/plan/schedule.cpp",
        "if (first == kNoValue || common == first) return;",
        "if (first == kNoValue || common <= first) return;",
        "asan Plan.*",
    ),
    Bug(
        "buffers that meet in one sweep may overlap",
        "src/plan/plan.cpp",
        "if (buffers[other].last_sweep < buffers[i].first_sweep ||",
        "if (buffers[other].last_sweep <= buffers[i].first_sweep ||",
        "asan Plan*",
    ),
    Bug(
        "a value can be loaded in the sweep that makes it",
        "src/plan/schedule.cpp",
        "return own.via == Via::stored ? own.time : own.time + 1;",
        "return own.time;",
        "asan Plan*",
    ),
    Bug(
        "an argument that several values share is paid for by each",
        "src/plan/frontier.cpp",
        "if (of_arg.open) network.edge(computed, 2 * of_arg.number, kImpossible);",
        "if (of_arg.open) network.edge(computed, 2 * of_arg.number, of_arg.cost.load);",
        "asan Frontier.*:Plan*",
    ),
    # src/codegen
    Bug(
        "a team that fills a block has none",
        "src/codegen/row_cut.cpp",
        "cut.teams = std::max<int64_t>(kBlockThreads / cut.team, 1);",
        "cut.teams = kBlockThreads / cut.team;",
        "stage kernels",
    ),
    Bug(
        "positions begin anew in every group",
        "src/codegen/sweep_context.cpp",
        "counted == seen(value).features && counted == space().features",
        "counted > 0 && seen(value).features == space().features",
        "python tests/python/test_emulated_kernels.py::test_kernels_of_models",
    ),
    Bug(
        "what a composition skips is taken from an earlier function",
        "src/codegen/rows_writer.cpp",
        "if (evaluated_.try_emplace(value, at).first->second == at)",
        "if (evaluated_.try_emplace(value, at).second)",
        "python tests/python/test_emulated_kernels.py::test_kernels_of_rows",
    ),
    Bug(
        "a row's values of every phase are resolved in the first",
        "src/codegen/rows_writer.cpp",
        "if (phase(value) - 1 == p) writer.assign(",
        "if (phase(value) - 1 >= p) writer.assign(",
        "stage kernels",
    ),
    Bug(
        "seven rows side by side are read together",
        "src/codegen/turned.cpp",
        "batch) < kRowsOfASector) continue;",
        "batch) < kRowsOfASector - 1) continue;",
        "asan CodegenTurned.A*:CodegenTurned.R*",
    ),
    Bug(
        "what lies turned is read in vectors",
        "src/codegen/body_writer.cpp",
        "if (!context_.is_apart(value, written)) return",
        "if (!written || !context_.is_apart(value, written)) return",
        "asan CodegenTurned.R*",
    ),
    Bug(
        "what is subtracted from its largest may be fused with its product",
        "src/codegen/device_functions.cpp",
        "(is_extreme(node.args[0]) || is_extreme(node.args[1]))",
        "is_extreme(node.args[0])",
        "asan Codegen.What*",
    ),
    Bug(
        "any number and erf(u) count as 1 + erf(u)",
        "src/codegen/device_functions.cpp",
        "!is_constant(args[1 - i], 1) || ",
        "graph_[args[1 - i]].kind != NodeKind::constant || ",
        "asan Codegen.One*",
    ),
    Bug(
        "what is also kept in fp32 is computed for 16 bits",
        "src/graph/readers.cpp",
        "(dtype == DType::f32 && !kept[i] && !of.empty() &&",
        "(dtype == DType::f32 && !of.empty() &&",
        "asan Codegen.What*",
    ),
    # src/cuda and src/program
    Bug(
        "a packed operand outlives what is written over it",
        "src/cuda/lowering.cpp",
        "const Range written = {begin.offset, begin.offset + bytes};",
        "const Range written = {begin.offset, begin.offset};",
        "asan LaunchProgram.*",
    ),
    Bug(
        "broadcast tensors count as dense",
        "src/program/program.cpp",
        "if (tensor.strides[axis] != expected) return false;",
        "if (tensor.strides[axis] > expected) return false;",
        "asan LaunchProgram.*",
    ),
    Bug(
        "a captured call is replayed for other frozen weights",
        "src/cuda/replay.cpp",
        "a.frozen == b.frozen && a.workspace_bytes",
        "a.workspace_bytes",
        "python tests/python/test_cuda_calls.py",
    ),
    Bug(
        "a library's product is given no workspace of its own",
        "src/cuda/launcher.cpp",
        "if (own > 0) bytes = std::max(bytes, workspace_of(step).offset + own);",
        "if (own > 0) bytes = std::max(bytes, workspace_of(step).offset);",
        "python tests/python/test_library_workspace.py",
    ),
    Bug(
        "a matrix is described as it was at another address",
        "src/cuda/launcher.cpp",
        "if (encoded.base != base || !same_matrix(encoded.spec, spec)) {",
        "if (!same_matrix(encoded.spec, spec)) {",
        "python tests/python/test_cuda_calls.py",
    ),
    Bug(
        "a damaged cache entry is used",
        "src/cuda/cubin_cache.cpp",
        "if (content_hash(key, payload) != header.hash) return std::nullopt;",
        "",
        "asan CubinCache*",
    ),
    Bug(
        "arguments of a launch lie where they are not aligned",
        "src/program/launch_program.cpp",
        "const size_t start = align_up(bytes.size(), kAlignment);",
        "const size_t start = bytes.size();",
        "asan LaunchProgram.*:Api.*",
    ),
    Bug(
        "programs that differ in their clusters have one hash",
        "src/program/launch_program.cpp",
        "step.cluster, text_of(step.arguments)",
        "0, text_of(step.arguments)",
        "asan LaunchProgram.*",
    ),
    # src/cpu
    Bug(
        "a bias is added for every part of a long sum",
        "src/cpu/product/blocked.cpp",
        "task.row = last && o_.row != nullptr ? o_.row + j : nullptr;",
        "task.row = o_.row != nullptr ? o_.row + j : nullptr;",
        "asan CpuProduct.*",
    ),
    Bug(
        "the last columns of a tile are written past the matrix",
        "src/cpu/product/blocked.cpp",
        "task.columns = std::min(width, columns.end - j);",
        "task.columns = width;",
        "asan CpuProduct.*",
    ),
    Bug(
        "a composite swallows a value that others read too",
        "src/cpu/composites.cpp",
        "uses(found) != 1 || slot(found).varies",
        "slot(found).varies",
        "asan CpuComposites.*",
    ),
    Bug(
        "overlapping rows are given to a BLAS",
        "src/cpu/product_lowering.cpp",
        "return rows <= 1 || stride >= columns;",
        "return rows <= 1 || stride >= 0;",
        "asan CpuExecutable.*",
    ),
    Bug(
        "a program goes on with a product that is registered no longer",
        "src/cpu/executable.cpp",
        "uint64_t products = registered_products();",
        "uint64_t products = 0;",
        "asan HostProgram.*",
    ),
    Bug(
        "what a sweep takes of the workspace is not told",
        "src/cpu/lowering.cpp",
        "program_.workspace_bytes = std::max(program_.workspace_bytes, used_);",
        "",
        "asan HostProgram.*",
    ),
    # src/standalone
    Bug(
        "a workspace of a standalone file forgets the batch",
        "src/standalone/program_writer.cpp",
        'buffer.shape.batched ? times("batch", bytes) : std::to_string(bytes)',
        "std::to_string(bytes)",
        "asan Standalone.*",
    ),
    Bug(
        "a standalone file lacks the system's headers",
        "src/standalone/amalgamate.cpp",
        "      system_.emplace(name);\n",
        "",
        "asan Amalgamation.*:Standalone.*",
    ),
    # kernels
    Bug(
        "merged variances lean to one side",
        "kernels/common/monoid.cuh",
        "delta * delta * (a.count * weight)",
        "delta * delta * (b.count * weight)",
        "asan Moments.*",
    ),
    Bug(
        "−inf − −inf is NaN in a log-sum-exp",
        "kernels/common/monoid.cuh",
        "return x == top ? T(0) : x - top;",
        "return x - top;",
        "asan LogSumExp.*",
    ),
    Bug(
        "the last samples of a sweep belong to no part",
        "kernels/sweeps/splits.h",
        "at_least_one(up(samples, result.per_split));",
        "at_least_one(samples / result.per_split);",
        "asan Codegen.Splits*",
    ),
    Bug(
        "a vector load of rows that are not a multiple of 16 bytes apart",
        "kernels/product/hopper/tiles.h",
        "k_stride == 1 && row_stride % 4 == 0 && k % 4 == 0 &&",
        "k_stride == 1 && k % 4 == 0 &&",
        "asan OperandShape.*",
    ),
    Bug(
        "device code of a portable product with a wrong name",
        "kernels/product/portable/packed.cuh",
        "if (promoted >= 0) running.promote(sum, promoted, pair);",
        "if (promoted >= 0) running.promote_all(sum, promoted, pair);",
        "stage kernels",
    ),
    Bug(
        "a loop over registers is not unrolled",
        "kernels/product/hopper/packed.cuh",
        "#pragma unroll\n        for (int i = 0; i < kValues; ++i) acc[i] += sum[i];",
        "#pragma unroll 1\n        for (int i = 0; i < kValues; ++i) acc[i] += sum[i];",
        "stage kernels",
    ),
    # python/ingot/capture
    Bug(
        "rsub subtracts the other way round",
        "python/ingot/capture/pointwise.py",
        '        a, b = b, a\n    if "alpha" in',
        '        pass\n    if "alpha" in',
        "python tests/python/test_capture_operators.py",
    ),
    Bug(
        "normalised by the unbiased variance in a backward pass",
        "python/ingot/capture/normalisations.py",
        '{"axes": axes, "unbiased": False}',
        '{"axes": axes, "unbiased": True}',
        "python tests/python/test_gradients.py",
    ),
    Bug(
        "a backward pass of tokens as rows is for one batch size",
        "python/ingot/capture/derivative.py",
        "sizes[dimension] * stride, each * batch\n",
        "sizes[dimension] * stride, sizes[dimension]\n",
        "python tests/python/test_backward_whole.py",
    ),
    # python/ingot/live
    Bug(
        "weights stay frozen in training",
        "python/ingot/live/state.py",
        'if self.frozen and graph.mode == "eval":',
        "if self.frozen:",
        "python tests/python/test_frozen.py",
    ),
    Bug(
        "a written weight counts as the packed one",
        "python/ingot/runtime/frozen.py",
        "if now is not tensor or now._version != version or",
        "if now is not tensor or",
        "python tests/python/test_frozen.py",
    ),
    Bug(
        "a cast to the module's own type rounds the truth",
        "python/ingot/verify/doubled.py",
        "if func in _CASTS and _CASTS[func] in self._own:",
        "if func in _CASTS and _CASTS[func] not in self._own:",
        "python tests/python/test_verify_doubled.py",
    ),
    Bug(
        "a number beside 16 bits is rounded to them",
        "python/ingot/capture/numbers.py",
        "like.dtype == torch.float32",
        "like.is_floating_point()",
        "python tests/python/test_numbers.py",
    ),
    Bug(
        "a write into a parameter with gradients switched off is seen",
        "python/ingot/live/unseen_writes.py",
        "if not torch.is_grad_enabled() and tensor.requires_grad:",
        "if torch.is_grad_enabled() and tensor.requires_grad:",
        "python tests/python/test_unseen_writes.py",
    ),
    Bug(
        "a write through what was detached is seen",
        "python/ingot/live/unseen_writes.py",
        "other.requires_grad == tensor.requires_grad",
        "other.requires_grad <= other.requires_grad",
        "python tests/python/test_unseen_writes.py",
    ),
    Bug(
        "a write of an operator that switches gradients off inside is seen",
        "python/ingot/live/unseen_writes.py",
        "if function is not None and tensor.grad_fn is function:",
        "if function is None and tensor.grad_fn is not function:",
        "python tests/python/test_unseen_writes.py",
    ),
    Bug(
        "hooks of what gets no gradient are called",
        "python/ingot/live/gradients.py",
        "            if self._severed:\n",
        "            if not self._severed:\n",
        "python tests/python/test_front_programs.py",
    ),
    Bug(
        "a result and what is computed from it are of one region",
        "python/ingot/live/returned.py",
        "if user in leading]",
        "if user not in leading]",
        "python tests/python/test_returned.py",
    ),
    Bug(
        "what no user gets ends a region",
        "python/ingot/live/returned.py",
        "if at not in inner)",
        "if at not in ())",
        "python tests/python/test_returned.py",
    ),
    # python/ingot/verify
    Bug(
        "an output's dtype is not compared",
        "python/ingot/verify/judging.py",
        "if output.shape != wanted.shape or output.dtype != wanted.dtype:",
        "if output.shape != wanted.shape:",
        "python tests/python/test_verify.py tests/python/test_verify_answers.py",
    ),
    Bug(
        "a candidate that opens the original's file goes unseen",
        "python/ingot/verify/watch.py",
        "if os.path.realpath(path) in self._original_files:",
        "if path in self._original_names:",
        "python tests/python/test_verify.py tests/python/test_verify_models.py",
    ),
    # python/ingot/cli and what it writes
    Bug(
        "`ingot verify` ends with 0 whatever was found",
        "python/ingot/cli/verify.py",
        'sys.exit(0 if result["verified"] else NOT_VERIFIED)',
        "sys.exit(0)",
        "python tests/python/test_cli_recorded.py tests/python/test_cli.py",
    ),
    Bug(
        "a file that was not verified is written",
        "python/ingot/cli/optimize.py",
        '        if result["verified"]:\n',
        "        if True:\n",
        "python tests/python/test_cli_recorded.py tests/python/test_cli.py",
    ),
    # What is compiled when
    Bug(
        "a call's kernels are those of dense tensors",
        "python/ingot/runtime/program.py",
        "ingot_program_compile(self._handle, batch, array, len(array))",
        "ingot_program_compile(self._handle, batch, None, 0)",
        "python tests/python/test_cuda_calls.py",
    ),
    Bug(
        "a launch compiles its kernels one by one",
        "src/cuda/launcher.cpp",
        "modules.load(context, units_of(program));",
        "modules.load(context, {step.unit});",
        "python tests/python/test_cuda_calls.py",
    ),
    Bug(
        "other batch sizes are compiled while times are taken",
        "python/ingot/runtime/ahead.py",
        "_others_are_off.set()",
        "pass",
        "python tests/python/test_ahead.py",
    ),
    Bug(
        "an epilogue's arithmetic costs nothing",
        "src/cuda/product_tuning.cpp",
        "own += epilogue_us(shape, epilogue.flops, target_);",
        "own += epilogue_us(shape, 0, target_);",
        "python tests/python/test_tuning.py",
    ),
    Bug(
        "an epilogue reads matrices for nothing",
        "src/cuda/product_tuning.cpp",
        "own += reading_us(shape, epilogue.bytes_read);",
        "own += reading_us(shape, 0);",
        "asan ProductTuning.*",
    ),
    Bug(
        "rows of padded gradients end in what was there",
        "python/ingot/live/padded.py",
        "copy[:, columns:] = 0",
        "copy[:, columns:] = 1",
        "python tests/python/test_padded_products.py",
    ),
    Bug(
        "a result without a gradient has one of zeros",
        "python/ingot/live/gradients.py",
        "if transformed or any(gradient is None for gradient in given):",
        "if transformed or all(gradient is None for gradient in given):",
        "python tests/python/test_front_programs.py",
    ),
    Bug(
        "the scores behind a mask are kept beside their softmax",
        "python/ingot/capture/kept.py",
        "return len(node.args) > MASKS[name] and operand is not node.args[MASKS[name]]",
        "return False",
        "python tests/python/test_attention_by_hand.py",
    ),
    Bug(
        "what Dynamo has seen change is of all modules of a class",
        "python/ingot/live/seen_sizes.py",
        "setattr(pgo, _STATE, self._own)",
        "pass",
        "python tests/python/test_attention_by_hand.py",
    ),
    Bug(
        "a tensor of one number promotes others",
        "python/ingot/capture/pointwise.py",
        "        dtype = sized\n",
        "        pass\n",
        "python tests/python/test_tensors_of_one_number.py",
    ),
    Bug(
        "a whole number of no dimensions is a flag beside flags",
        "python/ingot/capture/pointwise.py",
        "_kind(sized) == _kind(dtype)",
        "True",
        "python tests/python/test_tensors_of_one_number.py",
    ),
    Bug(
        "elements of a tuple are cut off from it",
        "python/ingot/live/pieces.py",
        "list(_elements_first(gm.graph.nodes))",
        "list(gm.graph.nodes)",
        "python tests/python/test_hooks_in_forwards.py",
    ),
    Bug(
        "a row of attention that sees nothing is NaN",
        "python/ingot/capture/reductions.py",
        'pointwise(call, "select", [blind, 0.0, weights])',
        "weights",
        "python tests/python/test_written_out.py",
    ),
    Bug(
        "a number is compared as it is with 16 bits",
        "python/ingot/capture/pointwise.py",
        "        return torch.tensor(float(operand), dtype=kinds.pop()).item()\n",
        "        return operand\n",
        "python tests/python/test_tensors_of_one_number.py",
    ),
]
