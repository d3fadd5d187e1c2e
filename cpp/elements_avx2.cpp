#define HALFBYTE_ISA isa_avx2
#if defined(__AVX2__)
#include "elements_lanes.hpp"

namespace halfbyte {

const ElementsTable elements_avx2{isa_avx2::block_amax, isa_avx2::rule_codes};

}  // namespace halfbyte
#endif
