// AVX2 (any x86-64 server since 2015): 32-byte vectors, in pairs, so that a mask of 16-bit lanes fills a register.
#include "spans.hpp"

#if defined(__x86_64__)

#include <immintrin.h>

#define DCR_TARGET __attribute__((target("avx2,bmi,f16c")))

namespace dcr {
namespace {

DCR_TARGET DCR_INLINE __m256i load(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }

// The mask of unequal lanes in two vectors of each side.
DCR_TARGET DCR_INLINE uint64_t unequal(__m256i a0, __m256i a1, __m256i b0, __m256i b1, uint8_t) {
    const uint32_t low = uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(a0, b0)));
    const uint32_t high = uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(a1, b1)));
    return ~(low | uint64_t(high) << 32);
}
DCR_TARGET DCR_INLINE uint64_t unequal(__m256i a0, __m256i a1, __m256i b0, __m256i b1, uint16_t) {
    // Packing interleaves the halves of the two vectors; the permutation puts them back in order.
    const __m256i equal = _mm256_packs_epi16(_mm256_cmpeq_epi16(a0, b0), _mm256_cmpeq_epi16(a1, b1));
    return uint32_t(~_mm256_movemask_epi8(_mm256_permute4x64_epi64(equal, _MM_SHUFFLE(3, 1, 2, 0))));
}
DCR_TARGET DCR_INLINE uint64_t unequal(__m256i a0, __m256i a1, __m256i b0, __m256i b1, uint32_t) {
    const int low = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(a0, b0)));
    const int high = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(a1, b1)));
    return uint64_t(~(low | high << 8)) & 0xFFFF;
}
DCR_TARGET DCR_INLINE uint64_t unequal(__m256i a0, __m256i a1, __m256i b0, __m256i b1, uint64_t) {
    const int low = _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(a0, b0)));
    const int high = _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(a1, b1)));
    return uint64_t(~(low | high << 4)) & 0xFF;
}

// Two vectors of each side at a time make a block. First a list of the blocks that differ, and their masks; then the
// lanes of each of them. The list grows past an entry only if it counts, so no branch depends on single blocks.
template <class W>
DCR_TARGET size_t compare(const W* now, const W* base, size_t n, uint32_t first, uint32_t* positions, W* bits,
                          W* old) {
    constexpr size_t LANES = 32 / sizeof(W), BLOCK = 2 * LANES, LIST = 64 * BLOCK;  // elements
    uint64_t masks[LIST / BLOCK];
    uint32_t starts[LIST / BLOCK];
    size_t k = 0, i = 0;
    for (const size_t whole = n - n % BLOCK; i < whole;) {
        const size_t end = whole - i < LIST ? whole : i + LIST;
        size_t blocks = 0;
        for (; i < end; i += BLOCK) {
            masks[blocks] = unequal(load(now + i), load(now + i + LANES), load(base + i), load(base + i + LANES), W{});
            starts[blocks] = uint32_t(i);
            blocks += masks[blocks] != 0;
        }
        for (size_t block = 0; block < blocks; ++block) {
            const size_t start = starts[block];
            k = append_lanes(masks[block], now + start, base + start, first + uint32_t(start), k, positions, bits, old);
        }
    }
    return k + compare_body(now + i, base + i, n - i, first + uint32_t(i), positions + k, bits + k, old + k);
}

template <class W>
DCR_TARGET Sums digest(const W* bits, size_t n, uint64_t index, uint64_t step, Key key) {
    return digest_body(bits, n, index, step, key);
}

template <class W>
DCR_TARGET Sums digest_at(const W* bits, size_t n, const uint32_t* positions, uint64_t index, uint64_t step, Key key) {
    return digest_at_body(bits, n, positions, index, step, key);
}

template <class W>
DCR_TARGET Pair digest_both_at(const W* old, const W* now, size_t n, const uint32_t* positions, uint64_t index, uint64_t step,
                               Key key) {
    return digest_both_at_body(old, now, n, positions, index, step, key);
}

template <class W>
DCR_TARGET Pair digest_both(const W* old, const W* now, size_t n, const uint64_t* indices, Key key) {
    return digest_both_body(old, now, n, indices, key);
}

// The machine's own conversion rounds to nearest even and keeps denormals whatever the mode bits say; only the NaNs
// have to be replaced.
DCR_TARGET void cast_f16(const uint32_t* bits, size_t n, uint16_t* out) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 wide = _mm256_castsi256_ps(load(bits + i));
        const __m128i half = _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(wide, wide, _CMP_UNORD_Q));
        const __m128i nan16 = _mm_packs_epi32(_mm256_castsi256_si128(nan), _mm256_extracti128_si256(nan, 1));
        const __m128i fixed = _mm_blendv_epi8(half, _mm_set1_epi16(0x7E00), nan16);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), fixed);
    }
    for (; i < n; ++i) out[i] = f16_of(bits[i]);
}

DCR_TARGET void cast(const uint32_t* bits, size_t n, int kind, uint16_t* out) {
    if (kind == F32_F16)
        cast_f16(bits, n, out);
    else
        cast_body(bits, n, kind, out);
}

template <class W>
constexpr Span<W> span{compare<W>, digest<W>, digest_at<W>, digest_both_at<W>, digest_both<W>};

}  // namespace

constinit const Spans AVX2{span<uint8_t>, span<uint16_t>, span<uint32_t>, span<uint64_t>, cast};

}  // namespace dcr

#endif
