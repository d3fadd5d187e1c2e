#define HALFBYTE_ISA isa_avx2
#if defined(__AVX2__)
#include "sampling_lanes.hpp"

namespace halfbyte {

const SamplingTable sampling_avx2{isa_avx2::scale_row, isa_avx2::exponentials, isa_avx2::block_sums, isa_avx2::log_probabilities, isa_avx2::logarithm};

}  // namespace halfbyte
#endif
