#define HALFBYTE_ISA isa_avx512
#if defined(__AVX512VNNI__)
#include "elements_lanes.hpp"

namespace halfbyte {

const ElementsTable elements_avx512{isa_avx512::block_amax, isa_avx512::rule_codes};

}  // namespace halfbyte
#endif
