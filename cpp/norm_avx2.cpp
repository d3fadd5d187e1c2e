#define HALFBYTE_ISA isa_avx2
#if defined(__AVX2__)
#include "norm_lanes.hpp"

namespace halfbyte {

const NormTable norm_avx2{isa_avx2::rms_norm, isa_avx2::rope, isa_avx2::swiglu_rows, isa_avx2::route};

}  // namespace halfbyte
#endif
