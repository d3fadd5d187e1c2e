#define HALFBYTE_ISA isa_generic
#include "quantise_lanes.hpp"

namespace halfbyte {

const QuantiseTable quantise_generic{isa_generic::amax_bits, isa_generic::usual_row_any, isa_generic::dequantise_row};

}  // namespace halfbyte

