#include "blas/graph_memory.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <tuple>
#include <vector>

#include "blas/card_memory.h"

namespace ingot::blas {
namespace {

constexpr unsigned kNoSynchronisation = 1;  // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
constexpr unsigned kMoves = 1;              // CU_GRAPH_USER_OBJECT_MOVE
constexpr int kActive = 1;                  // CU_STREAM_CAPTURE_STATUS_ACTIVE

// A capture's work on one stream runs in order, as on a stream. Streams are known by their handles
// here, which are unique while a capture lasts: to be asked for its number (identity_of()) ends the
// capture of a stream.
using Key = std::tuple<Context, unsigned long long, const void*>;

const void* name_of(Stream stream) {
  static thread_local char thread_marker;
  return is_per_thread(stream) ? &thread_marker : stream;
}

struct Block {
  Context context = nullptr;
  void* memory = nullptr;
  size_t bytes = 0;
  Key owner;
  Block* next = nullptr;
};

// Never destroyed: graphs may go in other libraries' destructors.
struct Blocks {
  std::mutex mutex;
  std::map<Key, Block*> current;
  std::vector<Block*> idle;
};
Blocks& blocks() {
  static Blocks& made = *new Blocks;
  return made;
}

// Whose graphs are gone. The driver says so on a thread of its own, which must not wait for one
// that calls the driver.
std::atomic<Block*> returned{nullptr};

void give_back(void* of_graph) {
  auto* const block = static_cast<Block*>(of_graph);
  block->next = returned.load();
  while (!returned.compare_exchange_weak(block->next, block)) {
  }
}

void collect(Blocks& b) {
  for (Block* block = returned.exchange(nullptr); block != nullptr; block = block->next) {
    const auto found = b.current.find(block->owner);
    if (found != b.current.end() && found->second == block) b.current.erase(found);
    b.idle.push_back(block);
  }
}

// The smallest idle one that suffices; else a new one. nullptr where there is no room.
Block* block_of(Blocks& b, Context context, size_t bytes) {
  auto best = b.idle.end();
  for (auto at = b.idle.begin(); at != b.idle.end(); ++at) {
    const bool fits = (*at)->context == context && (*at)->bytes >= bytes;
    if (fits && (best == b.idle.end() || (*at)->bytes < (*best)->bytes)) best = at;
  }
  if (best != b.idle.end()) {
    Block* const found = *best;
    b.idle.erase(best);
    return found;
  }
  const AllowDuringCapture allow;
  void* const memory = allocate_on_card(bytes);
  if (memory == nullptr) return nullptr;
  return new Block{context, memory, bytes, {}, nullptr};
}

// False, and the block is idle again, where the driver does not take it.
bool hold(void* graph, Block* block) {
  const Driver& d = *driver();
  void* object = nullptr;
  if (d.cuUserObjectCreate(&object, block, give_back, 1, kNoSynchronisation) != 0) {
    give_back(block);
    return false;
  }
  if (d.cuGraphRetainUserObject(graph, object, 1, kMoves) == 0) return true;
  d.cuUserObjectRelease(object, 1);  // which gives it back
  return false;
}

}  // namespace

Scratch graph_scratch(const Place& place, Stream stream, size_t bytes) {
  const Driver& d = *driver();
  if (d.cuStreamGetCaptureInfo == nullptr || d.cuUserObjectCreate == nullptr ||
      d.cuUserObjectRelease == nullptr || d.cuGraphRetainUserObject == nullptr) {
    return {};
  }
  int status = 0;
  unsigned long long capture = 0;
  void* graph = nullptr;
  if (d.cuStreamGetCaptureInfo(stream, &status, &capture, &graph, nullptr, nullptr) != 0 ||
      status != kActive || graph == nullptr) {
    return {};
  }
  Blocks& b = blocks();
  Scratch scratch;
  scratch.together = std::unique_lock(b.mutex);
  collect(b);
  const Key key = {place.context, capture, name_of(stream)};
  Block*& current = b.current[key];
  if (current == nullptr || current->bytes < bytes) {
    // Twice as much, so that products that grow hold few blocks. What they had is in their nodes.
    const size_t wanted = std::max(bytes, current == nullptr ? 0 : 2 * current->bytes);
    Block* block = block_of(b, place.context, wanted);
    if (block == nullptr && wanted > bytes) block = block_of(b, place.context, bytes);
    if (block == nullptr) return {};
    block->owner = key;
    if (!hold(graph, block)) return {};
    current = block;
  }
  scratch.memory = current->memory;
  scratch.bytes = current->bytes;
  return scratch;
}

}  // namespace ingot::blas
