#define HALFBYTE_ISA isa_generic
#include "refit_classes.hpp"
#include "refit_patch.hpp"

namespace halfbyte {

const RefitTable refit_generic{isa_generic::sparse, isa_generic::bitmask, isa_generic::is_fill, isa_generic::transpose_xor, isa_generic::apply_xor, isa_generic::check_sparse,
                         isa_generic::check_bitmask, isa_generic::apply_sparse, isa_generic::apply_bitmask, isa_generic::revert_sparse, isa_generic::revert_bitmask,
                         isa_generic::to_classes, isa_generic::from_classes,
                         isa_generic::count_differing, isa_generic::find_differing, isa_generic::put, isa_generic::patch_sparse, isa_generic::patch_bitmask};

}  // namespace halfbyte
