// Masks of AVX-512 as integers.
#pragma once

#include <cstdint>

namespace dcr {

// A mask of up to 32 lanes in 64 bits. By way of a general register: gcc 12 otherwise may spill the extended mask with a
// store of 32 bits (kmovd) and read 64 of them back, which it did in compare at -O1.
__attribute__((always_inline)) inline uint64_t widened(uint32_t mask) {
    asm("" : "+r"(mask));
    return mask;
}

}  // namespace dcr
