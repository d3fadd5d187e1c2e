#define HALFBYTE_ISA isa_generic
#include "elements_lanes.hpp"

namespace halfbyte {

const ElementsTable elements_generic{isa_generic::block_amax, isa_generic::rule_codes};

}  // namespace halfbyte
