#define HALFBYTE_ISA isa_avx2
#if defined(__AVX2__)
#include "refit_classes.hpp"
#include "refit_patch.hpp"

namespace halfbyte {

const RefitTable refit_avx2{isa_avx2::sparse, isa_avx2::bitmask, isa_avx2::is_fill, isa_avx2::transpose_xor, isa_avx2::apply_xor, isa_avx2::check_sparse,
                         isa_avx2::check_bitmask, isa_avx2::apply_sparse, isa_avx2::apply_bitmask, isa_avx2::revert_sparse, isa_avx2::revert_bitmask,
                         isa_avx2::to_classes, isa_avx2::from_classes,
                         isa_avx2::count_differing, isa_avx2::find_differing, isa_avx2::put, isa_avx2::patch_sparse, isa_avx2::patch_bitmask};

}  // namespace halfbyte
#endif
