#define HALFBYTE_ISA isa_avx2
#if defined(__AVX2__)
#include "guide_lanes.hpp"

namespace halfbyte {

const GuideTable guide_avx2{isa_avx2::guided_row, isa_avx2::narrow_row};

}  // namespace halfbyte
#endif
