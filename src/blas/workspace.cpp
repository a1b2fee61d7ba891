#include "blas/workspace.h"

#include <map>
#include <memory>
#include <shared_mutex>
#include <tuple>

#include "blas/card_memory.h"
#include "blas/graph_memory.h"

namespace ingot::blas {
namespace {

constexpr int kCallsUntilRetry = 1000, kCallsUntilLook = 250;

// Of one stream.
class Workspace {
 public:
  std::mutex mutex;

  bool reserve(size_t needed) {
    if (needed <= bytes_ && !must_go()) return true;
    if (refused_ != 0 && needed >= refused_ && calls_until_retry_-- > 0) return false;
    refused_ = needed;
    calls_until_retry_ = kCallsUntilRetry;
    const AllowDuringCapture allow;
    if (!has_room_on_card(needed, bytes_)) return false;
    free();
    size_t wanted = needed;
    memory_ = allocate_on_card(wanted);
    if (memory_ == nullptr) return false;
    bytes_ = wanted;
    refused_ = 0;
    return true;
  }
  void* memory() const { return memory_; }
  size_t bytes() const { return bytes_; }

 private:
  // The program may have come to need what this took when there was room.
  bool must_go() {
    if (++calls_ % kCallsUntilLook != 0 || !card_is_crowded()) return false;
    const AllowDuringCapture allow;
    free();
    refused_ = 1;
    calls_until_retry_ = kCallsUntilRetry;
    return true;
  }
  void free() {
    free_on_card(memory_, bytes_);
    memory_ = nullptr;
    bytes_ = 0;
  }

  void* memory_ = nullptr;
  size_t bytes_ = 0;
  size_t refused_ = 0;         // the least that there was no room for, and for how many calls
  int calls_until_retry_ = 0;  // nobody asks again: asking is slow
  unsigned calls_ = 0;
};

Workspace& workspace_of(const Place& place, Stream stream) {
  using Key = std::tuple<Context, uint64_t, const void*>;
  struct Registry {
    std::shared_mutex mutex;
    std::map<Key, std::unique_ptr<Workspace>> workspaces;
  };
  static Registry& registry = *new Registry;  // never destroyed
  static thread_local char thread_marker;
  const Key key = {place.context, identity_of(stream),
                   is_per_thread(stream) ? &thread_marker : nullptr};
  {
    const std::shared_lock lock(registry.mutex);
    const auto found = registry.workspaces.find(key);
    if (found != registry.workspaces.end()) return *found->second;
  }
  const std::unique_lock lock(registry.mutex);
  auto& place_in_map = registry.workspaces[key];
  if (!place_in_map) place_in_map = std::make_unique<Workspace>();
  return *place_in_map;
}

}  // namespace

Scratch scratch_for(const Place& place, Stream stream, size_t bytes, bool capturing) {
  if (capturing) return graph_scratch(place, stream, bytes);
  Workspace& workspace = workspace_of(place, stream);
  Scratch scratch;
  scratch.together = std::unique_lock(workspace.mutex);
  if (!workspace.reserve(bytes)) return {};
  scratch.memory = workspace.memory();
  scratch.bytes = workspace.bytes();
  return scratch;
}

}  // namespace ingot::blas
