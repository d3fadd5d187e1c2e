#define HALFBYTE_ISA isa_avx512
#if defined(__AVX512F__)
#include "refit_classes.hpp"
#include "refit_patch.hpp"

namespace halfbyte {

const RefitTable refit_avx512{isa_avx512::sparse, isa_avx512::bitmask, isa_avx512::is_fill, isa_avx512::transpose_xor, isa_avx512::apply_xor, isa_avx512::check_sparse,
                         isa_avx512::check_bitmask, isa_avx512::apply_sparse, isa_avx512::apply_bitmask, isa_avx512::revert_sparse, isa_avx512::revert_bitmask,
                         isa_avx512::to_classes, isa_avx512::from_classes,
                         isa_avx512::count_differing, isa_avx512::find_differing, isa_avx512::put, isa_avx512::patch_sparse, isa_avx512::patch_bitmask};

}  // namespace halfbyte
#endif
