#include "cuda/replay.h"

#include <xxhash.h>

#include <cstring>
#include <type_traits>

#include "support/log.h"

namespace ingot::cuda {
namespace {

// A graph costs as much as some dozens of calls; one that came so often comes again.
constexpr int kCaptureAt = 4;
constexpr int kRelaxed = 2;
constexpr unsigned kNonBlocking = 1;

uint64_t hash_of(const CallSignature& call) {
  static_assert(std::has_unique_object_representations_v<ingot_tensor>);
  const auto seed = reinterpret_cast<uintptr_t>(call.workspace) ^ static_cast<uint64_t>(call.batch);
  return XXH3_64bits_withSeed(call.tensors.data(), call.tensors.size_bytes(), seed);
}

bool same(const CallSignature& a, const CallSignature& b) {
  return a.context == b.context && a.batch == b.batch && a.workspace == b.workspace &&
         a.frozen == b.frozen && a.workspace_bytes == b.workspace_bytes &&
         a.tensors.size() == b.tensors.size() &&
         std::memcmp(a.tensors.data(), b.tensors.data(), a.tensors.size_bytes()) == 0;
}

// Some other thread may be capturing: what this one does on streams of its own is none of that.
class RelaxedCapture {
 public:
  RelaxedCapture() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;

 private:
  int mode_ = kRelaxed;
};

// nullptr where the driver would not.
CUgraph capture(const Replays::Launch& launch) {
  const Driver& d = driver();
  CUstream stream = nullptr;
  if (d.cuStreamCreate(&stream, kNonBlocking) != kCudaSuccess) return nullptr;
  CUgraph graph = nullptr;
  if (d.cuStreamBeginCapture(stream, kRelaxed) == kCudaSuccess) {
    bool complete = true;
    try {
      launch(stream);
    } catch (const std::exception& error) {
      log_line(LogLevel::debug, "a call could not be captured: {}", error.what());
      complete = false;
    }
    const bool ended = d.cuStreamEndCapture(stream, &graph) == kCudaSuccess;
    if (graph != nullptr && !(ended && complete)) {
      d.cuGraphDestroy(graph);
      graph = nullptr;
    }
  }
  d.cuStreamDestroy(stream);
  return graph;
}

CUgraphExec instantiate(const Replays::Launch& launch) {
  const RelaxedCapture relaxed;
  const CUgraph graph = capture(launch);
  if (graph == nullptr) return nullptr;
  CUgraphExec made = nullptr;
  if (driver().cuGraphInstantiateWithFlags(&made, graph, 0) != kCudaSuccess) made = nullptr;
  driver().cuGraphDestroy(graph);
  return made;
}

bool is_plain(CUstream stream) {
  int status = 0;
  return driver().cuStreamIsCapturing(stream, &status) == kCudaSuccess && status == 0;
}

}  // namespace

Replays::~Replays() {
  if (try_driver(nullptr) == nullptr) return;  // at exit, or in a forked child
  for (Seen& seen : seen_) release(seen);
}

void Replays::release(Seen& seen) {
  // Launches under way finish first.
  if (seen.graph != nullptr) driver().cuGraphExecDestroy(seen.graph);
  seen.graph = nullptr;
  seen.times = 0;
}

Replays::Seen& Replays::find(const CallSignature& call) {
  const uint64_t hash = hash_of(call);
  Seen* oldest = nullptr;
  for (Seen& seen : seen_) {
    if (seen.hash == hash && same(seen.call, call)) return seen;
    if (oldest == nullptr || seen.last_use < oldest->last_use) oldest = &seen;
  }
  if (seen_.size() < kMost) {
    oldest = &seen_.emplace_back();
  } else {
    release(*oldest);
  }
  oldest->hash = hash;
  oldest->tensors.assign(call.tensors.begin(), call.tensors.end());
  oldest->call = call;
  oldest->call.tensors = oldest->tensors;
  return *oldest;
}

void Replays::forget() {
  const std::lock_guard lock(mutex_);
  for (Seen& seen : seen_) release(seen);
  seen_.clear();
}

void Replays::run(const CallSignature& call, CUstream stream, const Launch& launch) {
  // A graph may be launched by one thread at a time; the others need not wait for it.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || !is_plain(stream)) return launch(stream);
  Seen& seen = find(call);
  seen.last_use = ++uses_;
  if (seen.graph == nullptr && seen.times >= 0 && ++seen.times == kCaptureAt) {
    seen.graph = instantiate(launch);
    if (seen.graph == nullptr) seen.times = -1;
  }
  if (seen.graph == nullptr) return launch(stream);
  check(driver().cuGraphLaunch(seen.graph, stream), "launching a graph");
}

}  // namespace ingot::cuda
