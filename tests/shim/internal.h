// What the parts of the runtime know of each other.
#pragma once
#include "include/runtime.h"

namespace shim {

// runtime.cpp: of the thread that runs
struct Now { int thread; unsigned block_epoch, warp_epoch; };
bool running();  // whether there is one
Region stack();
Now now();

// memory.cpp
void allow(const Launch& launch, void* dynamic);  // the memory that this launch may touch
void spoil_shared_memory();
const char* place(uintptr_t site, char (&text)[32]);  // as the caller translates it into file and line

// races.cpp
void track(size_t dynamic_size, size_t static_size);  // this many bytes of shared memory
void visit(bool dynamic, size_t first, size_t size, bool store, uintptr_t site);

}  // namespace shim
