#include "cuda/compiler.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "codegen/embedded_kernels.h"
#include "cuda/nvrtc.h"
#include "support/error.h"
#include "support/log.h"

namespace ingot::cuda {
namespace {

constexpr size_t kMaxThreads = 32;

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

// Compilations that are under way in this process, by cache key: equal kernels of programs that are
// compiled side by side are compiled once.
class UnderWay {
 public:
  // Whether the caller is the first to ask, and makes it; else waits until the first has finished,
  // but not for ever: in a forked child it never does.
  bool begin(const std::string& key) {
    constexpr auto kLongest = std::chrono::seconds(20);
    std::unique_lock lock(mutex_);
    if (keys_.insert(key).second) return true;
    finished_.wait_for(lock, kLongest, [&] { return !keys_.contains(key); });
    return false;
  }

  void end(const std::string& key) {
    const std::lock_guard lock(mutex_);
    keys_.erase(key);
    finished_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable finished_;
  std::set<std::string> keys_;
};

std::string compile_new(const CompileRequest& request, const std::string& architecture,
                        const std::string& key, const CubinCache& cache) {
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

// What another thread has just made is found in the cache; where there is none, it is made again.
std::string compile_one(const CompileRequest& request, const std::string& architecture,
                        const CubinCache& cache) {
  static UnderWay under_way;
  const std::string key = cache_key(request, architecture);
  if (!under_way.begin(key)) return compile_new(request, architecture, key, cache);
  const std::unique_ptr<UnderWay, std::function<void(UnderWay*)>> end(
      &under_way, [&key](UnderWay* all) { all->end(key); });
  return compile_new(request, architecture, key, cache);
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
  std::map<std::string_view, std::vector<size_t>> by_text;
  for (size_t i = 0; i < requests.size(); ++i) by_text[requests[i].text].push_back(i);
  std::vector<const std::vector<size_t>*> different;
  for (const auto& [text, equal] : by_text) different.push_back(&equal);
  std::vector<std::string> results(requests.size());
  std::atomic<size_t> next{0};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  const auto work = [&] {
    for (size_t i = next++; i < different.size(); i = next++) {
      const std::vector<size_t>& equal = *different[i];
      try {
        const std::string code = compile_one(requests[equal.front()], architecture, cache);
        for (const size_t request : equal) results[request] = code;
      } catch (...) {
        const std::lock_guard lock(failure_mutex);
        if (!failure) failure = std::current_exception();
      }
    }
  };
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const size_t threads = std::min({different.size(), kMaxThreads, cores});
  std::vector<std::thread> others;
  for (size_t i = 1; i < threads; ++i) others.emplace_back(work);
  work();
  for (std::thread& thread : others) thread.join();
  if (failure) std::rethrow_exception(failure);
  return results;
}

}  // namespace ingot::cuda
