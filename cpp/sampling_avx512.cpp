#define HALFBYTE_ISA isa_avx512
#if defined(__AVX512F__)
#include "sampling_lanes.hpp"

namespace halfbyte {

const SamplingTable sampling_avx512{isa_avx512::scale_row, isa_avx512::exponentials, isa_avx512::block_sums, isa_avx512::log_probabilities, isa_avx512::logarithm};

}  // namespace halfbyte
#endif
