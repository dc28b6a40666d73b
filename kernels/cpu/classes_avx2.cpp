// AVX2 and BMI2: signed compares, since a magnitude has no sign.
#if defined(__x86_64__)

#define DCR_TARGET __attribute__((target("avx2,bmi,bmi2,popcnt")))
#include "classes.hpp"

#include <immintrin.h>

namespace dcr {
namespace {

DCR_TARGET DCR_INLINE __m256i load(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }

// Which of the elements in one vector have at least the magnitude `below + 1`, as one bit each.
DCR_TARGET DCR_INLINE uint64_t above_of(const uint8_t* base, __m256i below) {
    const __m256i magnitude = _mm256_and_si256(load(base), _mm256_set1_epi8(0x7F));
    return uint32_t(_mm256_movemask_epi8(_mm256_cmpgt_epi8(magnitude, below)));
}
DCR_TARGET DCR_INLINE uint64_t above_of(const uint16_t* base, __m256i below) {
    const __m256i mask = _mm256_set1_epi16(0x7FFF);
    const __m256i low = _mm256_cmpgt_epi16(_mm256_and_si256(load(base), mask), below);
    const __m256i high = _mm256_cmpgt_epi16(_mm256_and_si256(load(base + 16), mask), below);
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8);
    return uint32_t(_mm256_movemask_epi8(both));
}
DCR_TARGET DCR_INLINE uint64_t above_of(const uint32_t* base, __m256i below) {
    const __m256i magnitude = _mm256_and_si256(load(base), _mm256_set1_epi32(0x7FFFFFFF));
    return unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(magnitude, below))));
}
DCR_TARGET DCR_INLINE uint64_t above_of(const uint64_t* base, __m256i below) {
    const __m256i magnitude = _mm256_and_si256(load(base), _mm256_set1_epi64x(INT64_MAX));
    return unsigned(_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpgt_epi64(magnitude, below))));
}

DCR_TARGET DCR_INLINE __m256i everywhere(uint8_t value) { return _mm256_set1_epi8(char(value)); }
DCR_TARGET DCR_INLINE __m256i everywhere(uint16_t value) { return _mm256_set1_epi16(short(value)); }
DCR_TARGET DCR_INLINE __m256i everywhere(uint32_t value) { return _mm256_set1_epi32(int(value)); }
DCR_TARGET DCR_INLINE __m256i everywhere(uint64_t value) { return _mm256_set1_epi64x(int64_t(value)); }

struct Avx2 {
    template <class W>
    DCR_TARGET DCR_INLINE static void at_least(const W* base, const W* lowest, uint64_t* above) {
        constexpr size_t AT_ONCE = sizeof(W) <= 2 ? 32 : 32 / sizeof(W);
        for (size_t c = 0; c < CUTS; ++c) {
            const __m256i below = everywhere(W(lowest[c] - 1));
            uint64_t word = 0;
            for (size_t i = 0; i < BLOCK_ELEMS; i += AT_ONCE) word |= above_of(base + i, below) << i;
            above[c] = word;
        }
    }
    DCR_TARGET DCR_INLINE static uint64_t nth(uint64_t word, uint32_t n) { return _pdep_u64(uint64_t(1) << n, word); }
};

template <class W>
DCR_TARGET void rank(const W* base, size_t N, const W* lowest, const uint32_t* positions, size_t K, uint32_t* ranks,
                     uint8_t* classes) {
    rank_body<Avx2>(base, N, lowest, positions, K, ranks, classes);
}

template <class W>
DCR_TARGET size_t merge(const W* base, size_t N, const W* lowest, const size_t* ends, const uint32_t* ranks,
                        const W* values, uint32_t* positions, W* merged) {
    return merge_body<Avx2>(base, N, lowest, ends, ranks, values, positions, merged);
}

template <class W>
constexpr Classer<W> classer{rank<W>, merge<W>};

}  // namespace

constinit const Classers AVX2_CLASSERS{classer<uint8_t>, classer<uint16_t>, classer<uint32_t>, classer<uint64_t>};

}  // namespace dcr

#endif
