#define HALFBYTE_ISA isa_avx512
#if defined(__AVX512F__)
#include "norm_lanes.hpp"

namespace halfbyte {

const NormTable norm_avx512{isa_avx512::rms_norm, isa_avx512::rope, isa_avx512::swiglu_rows, isa_avx512::route};

}  // namespace halfbyte
#endif
