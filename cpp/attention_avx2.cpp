#define HALFBYTE_ISA isa_avx2
#if defined(__AVX2__)
#include "attention_lanes.hpp"

namespace halfbyte {

const AttentionTable attention_avx2{isa_avx2::attend};

}  // namespace halfbyte
#endif
