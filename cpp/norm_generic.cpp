#define HALFBYTE_ISA isa_generic
#include "norm_lanes.hpp"

namespace halfbyte {

const NormTable norm_generic{isa_generic::rms_norm, isa_generic::rope, isa_generic::swiglu_rows, isa_generic::route};

}  // namespace halfbyte
