#define HALFBYTE_ISA isa_avx2
#if defined(__AVX2__)
#include "quantise_lanes.hpp"

namespace halfbyte {

const QuantiseTable quantise_avx2{isa_avx2::amax_bits, isa_avx2::usual_row_any, isa_avx2::dequantise_row};

}  // namespace halfbyte
#endif

