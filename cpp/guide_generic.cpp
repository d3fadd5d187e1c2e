#define HALFBYTE_ISA isa_generic
#include "guide_lanes.hpp"

namespace halfbyte {

const GuideTable guide_generic{isa_generic::guided_row, isa_generic::narrow_row};

}  // namespace halfbyte
