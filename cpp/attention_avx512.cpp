#define HALFBYTE_ISA isa_avx512
#if defined(__AVX512F__)
#include "attention_lanes.hpp"

namespace halfbyte {

const AttentionTable attention_avx512{isa_avx512::attend};

}  // namespace halfbyte
#endif
