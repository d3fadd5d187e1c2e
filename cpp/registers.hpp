// One declaration for each kernel family: module.cpp calls them, each family's *.cpp defines its own.
#pragma once

#include <nanobind/nanobind.h>

namespace halfbyte {

void register_quantise(nanobind::module_& m);
void register_guide(nanobind::module_& m);
void register_elements(nanobind::module_& m);
void register_guidance_rows(nanobind::module_& m);
void register_linear(nanobind::module_& m);
void register_experts(nanobind::module_& m);
void register_norm(nanobind::module_& m);
void register_attention(nanobind::module_& m);
void register_attend(nanobind::module_& m);
void register_sampling(nanobind::module_& m);
void register_refit(nanobind::module_& m);

}  // namespace halfbyte
