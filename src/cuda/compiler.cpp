#include "cuda/compiler.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

#include "codegen/embedded_kernels.h"
#include "cuda/nvrtc.h"
#include "support/error.h"
#include "support/log.h"

namespace ingot::cuda {
namespace {

constexpr size_t kMaxThreads = 8;

const EmbeddedKernel* find_header(std::string_view path) {
  for (const EmbeddedKernel& header : embedded_kernels()) {
    if (header.path == path) return &header;
  }
  return nullptr;
}

// Includes are written one a line, with the path from kernels/.
void add_includes(std::string_view text, std::map<std::string, std::string>& found) {
  constexpr std::string_view kDirective = "#include \"";
  for (size_t at = text.find(kDirective); at != std::string_view::npos;
       at = text.find(kDirective, at + 1)) {
    const size_t begin = at + kDirective.size();
    const size_t end = text.find('"', begin);
    if (end == std::string_view::npos) return;
    const std::string path(text.substr(begin, end - begin));
    const EmbeddedKernel* header = find_header(path);
    if (header == nullptr || !found.emplace(path, header->text).second) continue;
    add_includes(header->text, found);
  }
}

std::string compile_one(const CompileRequest& request, const std::string& architecture,
                        const CubinCache& cache) {
  const std::string key = cache_key(request, architecture);
  if (auto cached = cache.find(key)) {
    log_line(LogLevel::debug, "{} is in the kernel cache", request.name);
    return *std::move(cached);
  }
  const auto start = std::chrono::steady_clock::now();
  const Compilation result = nvrtc_compile(request.name, request.text, headers_of(request.text),
                                           compile_options(architecture));
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  log_line(LogLevel::info, "compiled {} for {} in {:.0f} ms", request.name, architecture,
           took.count());
  if (!cache.store(key, result.code)) {
    log_line(LogLevel::info, "{} could not be kept in the kernel cache", request.name);
  }
  return result.code;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> headers_of(const std::string& source) {
  std::map<std::string, std::string> found;
  add_includes(source, found);
  return {found.begin(), found.end()};
}

std::vector<std::string> compile_options(const std::string& architecture) {
  return {"--gpu-architecture=" + architecture, "-std=c++17"};
}

std::string cache_key(const CompileRequest& request, const std::string& architecture) {
  const NvrtcInfo& info = nvrtc_info();
  std::string key =
      fmt::format("ingot kernel 1\n{}\nnvrtc {}.{}\n", request.name, info.major, info.minor);
  for (const std::string& option : compile_options(architecture)) key += option + "\n";
  key += "\n" + request.text;
  for (const auto& [path, text] : headers_of(request.text)) key += "\n// " + path + "\n" + text;
  return key;
}

std::vector<std::string> compile_all(const std::vector<CompileRequest>& requests, int sm,
                                     const CubinCache& cache) {
  const std::string architecture = nvrtc_architecture(sm);
  std::vector<std::string> results(requests.size());
  std::atomic<size_t> next{0};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  const auto work = [&] {
    for (size_t i = next++; i < requests.size(); i = next++) {
      try {
        results[i] = compile_one(requests[i], architecture, cache);
      } catch (...) {
        const std::lock_guard lock(failure_mutex);
        if (!failure) failure = std::current_exception();
      }
    }
  };
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const size_t threads = std::min({requests.size(), kMaxThreads, cores});
  std::vector<std::thread> others;
  for (size_t i = 1; i < threads; ++i) others.emplace_back(work);
  work();
  for (std::thread& thread : others) thread.join();
  if (failure) std::rethrow_exception(failure);
  return results;
}

}  // namespace ingot::cuda
