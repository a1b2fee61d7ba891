// Whether an AMX instruction executes here.
#pragma once

#include "cpu/product/amx/engine.h"

namespace ingot::cpu::amx {

// Runs the scheme's product instruction once, in a child of its own that shares this process's
// memory: an illegal instruction ends the child alone, and the host process's signal handlers, fork
// handlers and children are left alone. False too where no child can be made.
bool executes(Scheme scheme);

// The same for any function; for tests. The function may write memory, but call nothing that
// allocates or locks.
bool survives(void (*function)());

}  // namespace ingot::cpu::amx
