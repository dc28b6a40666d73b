// Value maps, float32 bits to 16-bit bits: round to nearest even, denormals kept, overflow to infinity, and every NaN
// becomes the one quiet, positive NaN. Integer code without branches (but for one addition), so that loops vectorise.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace dcr {

enum Kind : int { NONE = 0, F32_BF16 = 1, F32_F16 = 2 };

[[gnu::always_inline]] inline uint16_t bf16_of(uint32_t bits) {
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    return uint16_t(nan ? 0x7FC0u : rounded);
}

[[gnu::always_inline]] inline uint16_t f16_of(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    // Normal results: move the exponent's bias from 127 to 15 and round away 13 bits; what rounds past the largest
    // half, and infinity itself, is capped at infinity.
    const uint32_t moved = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    const uint32_t normal = moved < 0x7C00u ? moved : 0x7C00u;
    // Results below 2^-14: in 0.5 + x the last bit of the sum is worth 2^-24, one denormal step, and the addition
    // rounds to nearest even.
    const uint32_t denormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
    const uint32_t half = (magnitude < 0x38800000u ? denormal : normal) | ((bits >> 16) & 0x8000u);
    return uint16_t(magnitude > 0x7F800000u ? 0x7E00u : half);
}

}  // namespace dcr
