// The text of the headers of kernels/, embedded at build time (cmake/EmbedKernels.cmake).
#pragma once

#include <span>
#include <string_view>

namespace ingot {

// One header: `path` as an #include names it ("common/monoid.cuh") and its whole text.
struct EmbeddedKernel {
  std::string_view path;
  std::string_view text;
};

// Every header, sorted by path; valid for the life of the process.
std::span<const EmbeddedKernel> embedded_kernels();

}  // namespace ingot
