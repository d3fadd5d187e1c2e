#define HALFBYTE_ISA isa_generic
#include "attention_lanes.hpp"

namespace halfbyte {

const AttentionTable attention_generic{isa_generic::attend};

}  // namespace halfbyte
