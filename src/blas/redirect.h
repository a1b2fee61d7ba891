// Taking products in a process that already runs: every loaded library reaches functions of others
// through a table of addresses of its own (the ELF global offset table), which the loader filled.
// Here the entries that name cuBLAS's products, or dlsym, are pointed to this library's, and back.
//
// Not reached: addresses that a program has already asked dlsym for and keeps, cuBLAS linked into
// a library statically, another copy of cuBLAS than the first one found, addresses of functions in
// data. Libraries that are loaded later are found at the next call of dlsym, which is how Python
// goes on after it has loaded one.
#pragma once

extern "C" {

// Takes products from now on. Gives how many entries for cuBLAS's products point here; -1 where
// the environment says that none may be taken. Calls are counted in no way: one disable undoes
// all. Safe on any thread; nothing of CUDA is called.
[[gnu::visibility("default")]] int ingot_blas_enable();
// Leaves all products to cuBLAS, and every table as it was.
[[gnu::visibility("default")]] void ingot_blas_disable();
// Names of libraries whose products go to another copy of cuBLAS, one a line; valid until the next
// call on this thread.
[[gnu::visibility("default")]] const char* ingot_blas_unreached();
// Whether this library came before cuBLAS when the process began, so that all of it is reached.
[[gnu::visibility("default")]] int ingot_blas_preloaded();
}

namespace ingot::blas {

// Cheap where nothing was loaded since the last time, or products are not redirected.
void redirect_what_was_loaded();

}  // namespace ingot::blas
