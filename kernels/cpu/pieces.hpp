// Pieces: a region's elements as dense memory, in numbering order, without a copy where the storage allows it.
#pragma once

#include <algorithm>

#include "cast.hpp"
#include "spans.hpp"
#include "table.hpp"

namespace dcr {

// Elements of a piece: with its cast and its base at most 80 KiB, so that it is still in L2 when it is looked at again.
constexpr uint32_t PIECE = 4096;

// Runs shorter than this many bytes are copied together rather than looked at one by one.
constexpr size_t SHORT_RUN_BYTES = 512;

template <class W>
bool is_direct(const Region& region) {
    return region.inner().here == 1 && (region.ndim == 1 || region.inner().n * sizeof(W) >= SHORT_RUN_BYTES);
}

// Copies `count` elements from number `from` of the region on to `out`, dense.
template <class W>
void fill(const Region& region, uint32_t from, uint32_t count, W* out) {
    const W* storage = reinterpret_cast<const W*>(region.data);
    const int64_t stride = region.inner().here;
    for (Runs runs(region, from);; runs.next()) {
        const W* run = storage + runs.here();
        const uint32_t taken = std::min(count, runs.count());
        if (stride == 1)
            for (uint32_t i = 0; i < taken; ++i) out[i] = run[i];
        else
            for (uint32_t i = 0; i < taken; ++i) out[i] = run[int64_t(i) * stride];
        out += taken;
        count -= taken;
        if (count == 0) return;
    }
}

// Calls f(const W* elements, uint32_t first, uint32_t n) for pieces of at most PIECE elements, or, where they are not
// copied, of at most `limit`; `first` is a table number.
template <class W, class F>
void for_pieces(const Region& region, uint32_t limit, F&& f) {
    if (!is_direct<W>(region)) {
        W copied[PIECE];
        for (uint64_t from = 0; from < region.numel; from += PIECE) {
            const uint32_t n = uint32_t(std::min<uint64_t>(PIECE, region.numel - from));
            fill(region, uint32_t(from), n, copied);
            f(static_cast<const W*>(copied), uint32_t(region.first + from), n);
        }
        return;
    }
    const W* storage = reinterpret_cast<const W*>(region.data);
    Runs runs(region, 0);
    for (uint64_t from = 0; from < region.numel; from += runs.count(), runs.next()) {
        for (uint64_t i = 0; i < runs.count(); i += limit) {
            const uint32_t n = uint32_t(std::min<uint64_t>(limit, runs.count() - i));
            f(storage + runs.here() + int64_t(i), uint32_t(region.first + from + i), n);
        }
    }
}

}  // namespace dcr
