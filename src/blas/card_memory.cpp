#include "blas/card_memory.h"

#include <atomic>
#include <cstdlib>

#include "blas/device.h"

namespace ingot::blas {
namespace {

constexpr size_t kGrain = size_t{2} << 20;
constexpr size_t kOfTheCard = 8, kStaysFree = 16;  // parts of it

std::atomic<size_t> reserved{0};

size_t most_bytes(size_t total) {
  static const char* const given = std::getenv("INGOT_BLAS_MEMORY");
  if (given != nullptr && *given != '\0') return std::strtoull(given, nullptr, 10) << 20;
  return total / kOfTheCard;
}

}  // namespace

bool has_room_on_card(size_t bytes, size_t instead) {
  size_t free = 0, total = 0;
  return driver()->cuMemGetInfo(&free, &total) == 0 &&
         reserved.load() - instead + bytes <= most_bytes(total) &&
         bytes + total / kStaysFree <= free + instead;
}

void* allocate_on_card(size_t& bytes) {
  bytes = (bytes + kGrain - 1) / kGrain * kGrain;
  void* memory = nullptr;
  if (!has_room_on_card(bytes, 0) || driver()->cuMemAlloc(&memory, bytes) != 0) return nullptr;
  reserved += bytes;
  return memory;
}

void free_on_card(void* memory, size_t bytes) {
  if (memory == nullptr) return;
  driver()->cuMemFree(memory);
  reserved -= bytes;
}

bool card_is_crowded() {
  size_t free = 0, total = 0;
  return driver()->cuMemGetInfo(&free, &total) == 0 && free < total / kStaysFree / 2;
}

}  // namespace ingot::blas
