// Allocations of the card's memory, within the bounds that workspace.h names.
#pragma once

#include <cstddef>

namespace ingot::blas {

// In whole pieces of 2 MiB: `bytes` says how much it is then. nullptr where there is no room.
void* allocate_on_card(size_t& bytes);
// Whether there would be if `instead` bytes of what is allocated were given back.
bool has_room_on_card(size_t bytes, size_t instead);
// Waits for the device.
void free_on_card(void* memory, size_t bytes);

// Whether the card has less left than must stay free, by half.
bool card_is_crowded();

}  // namespace ingot::blas
