#define HALFBYTE_ISA isa_generic
#include "linear_lanes.hpp"

namespace halfbyte {

const LinearTable linear_generic{isa_generic::w4a4_lanes, isa_generic::dense, isa_generic::expand<isa_generic::PlainBlock>, isa_generic::round_bf16};

}  // namespace halfbyte
