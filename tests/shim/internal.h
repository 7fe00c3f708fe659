// What the parts of the runtime know of each other.
#pragma once
#include "include/runtime.h"

namespace shim {

bool running();   // whether a thread of a kernel runs
Region stack();   // of that thread

void allow(const Launch& launch, void* dynamic);  // the memory that this launch may touch
void spoil_shared_memory();
uintptr_t offset_in_program(uintptr_t site);

}  // namespace shim
