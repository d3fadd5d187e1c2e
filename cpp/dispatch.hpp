// Instruction sets. A file named *_avx2.cpp, *_avx512.cpp or *_amx.cpp is compiled with that set's flags (see CMakeLists.txt),
// every other file for the baseline of the architecture. Code in those files lives in a namespace of the set (or an anonymous
// one), never in shared inline functions: the linker keeps one copy of an inline function and could pick the AVX-512 one for all.
#pragma once

namespace halfbyte {

// avx512: F, BW, DQ, VL and VNNI. amx: the same and AMX-INT8, which only the w4a4 product uses.
enum class Isa : int { generic = 0, avx2 = 1, avx512 = 2, amx = 3 };

// The best set this processor and operating system can run (found once).
Isa best_isa();

// Clamps a requested set to what the processor can run: Python passes `int isa` as the first argument of every kernel. The first
// never returns amx, for the kernels that have no use for tiles.
Isa usable_isa(int requested);
Isa usable_matrix_isa(int requested);

}  // namespace halfbyte
