// The level that every machine has: what the compiler makes of plain loops (SSE2 on x86-64, NEON on aarch64).
#include "spans.hpp"

namespace dcr {
namespace {

template <class W>
size_t compare(const W* now, const W* base, size_t n, uint32_t first, uint32_t* positions, W* bits,
               W* old) {
    return compare_body(now, base, n, first, positions, bits, old);
}

template <class W>
Sums digest(const W* bits, size_t n, uint64_t index, uint64_t step, Key key) {
    return digest_body(bits, n, index, step, key);
}

template <class W>
Sums digest_at(const W* bits, size_t n, const uint32_t* positions, uint64_t index, uint64_t step, Key key) {
    return digest_at_body(bits, n, positions, index, step, key);
}

template <class W>
Pair digest_both_at(const W* old, const W* now, size_t n, const uint32_t* positions, uint64_t index, uint64_t step,
                    Key key) {
    return digest_both_at_body(old, now, n, positions, index, step, key);
}

template <class W>
Pair digest_both(const W* old, const W* now, size_t n, const uint64_t* indices, Key key) {
    return digest_both_body(old, now, n, indices, key);
}

void cast(const uint32_t* bits, size_t n, int kind, uint16_t* out) { cast_body(bits, n, kind, out); }

template <class W>
constexpr Span<W> span{compare<W>, digest<W>, digest_at<W>, digest_both_at<W>, digest_both<W>};

}  // namespace

constinit const Spans PORTABLE{span<uint8_t>, span<uint16_t>, span<uint32_t>, span<uint64_t>, cast};

}  // namespace dcr
