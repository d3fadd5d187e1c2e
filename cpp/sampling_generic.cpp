#define HALFBYTE_ISA isa_generic
#include "sampling_lanes.hpp"

namespace halfbyte {

const SamplingTable sampling_generic{isa_generic::scale_row, isa_generic::exponentials, isa_generic::block_sums, isa_generic::log_probabilities, isa_generic::logarithm};

}  // namespace halfbyte
