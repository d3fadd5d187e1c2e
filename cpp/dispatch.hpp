// Instruction sets. A file named *_avx2.cpp or *_avx512.cpp is compiled with that set's flags (see CMakeLists.txt), every
// other file for the baseline of the architecture. Code in those files lives in a namespace of the set (or an anonymous one),
// never in shared inline functions: the linker keeps one copy of an inline function and could pick the AVX-512 one for all.
#pragma once

namespace halfbyte {

// avx512 means F, BW, DQ, VL and VNNI. (AMX tiles were tried for w4a4: with exact dots of 16 values apart the vector units, which
// run at half speed beside tiles on Sapphire Rapids, still do the scaling, and the sum is no faster than VNNI.)
enum class Isa : int { generic = 0, avx2 = 1, avx512 = 2 };

// The best set this processor and operating system can run (found once).
Isa best_isa();

// Clamps a requested set to what the processor can run: Python passes `int isa` as the first argument of every kernel.
Isa usable_isa(int requested);

}  // namespace halfbyte
