// AVX2 (any x86-64 server since 2015): the plain loops, compiled for 32-byte vectors.
#include "spans.hpp"

#if defined(__x86_64__)

#define DCR_TARGET __attribute__((target("avx2,bmi")))

namespace dcr {
namespace {

template <class W>
DCR_TARGET size_t compare(const W* now, const W* base, size_t n, uint32_t first, uint32_t* positions, W* bits) {
    return compare_body(now, base, n, first, positions, bits);
}

template <class W>
DCR_TARGET Sums digest(const W* bits, size_t n, uint64_t index, uint64_t step, Key key) {
    return digest_body(bits, n, index, step, key);
}

template <class W>
DCR_TARGET Sums digest_at(const W* bits, size_t n, const uint64_t* indices, Key key) {
    return digest_at_body(bits, n, indices, key);
}

DCR_TARGET void cast(const uint32_t* bits, size_t n, int kind, uint16_t* out) { cast_body(bits, n, kind, out); }

template <class W>
constexpr Span<W> span{compare<W>, digest<W>, digest_at<W>};

}  // namespace

constinit const Spans AVX2{span<uint8_t>, span<uint16_t>, span<uint32_t>, span<uint64_t>, cast};

}  // namespace dcr

#endif
