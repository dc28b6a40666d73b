// Pieces: a region's elements as dense memory, in numbering order, without a copy where the storage allows it.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>

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

// A slab: whole rows of a transposed region, copied together so that each cache line of the storage is fetched once.
constexpr size_t SLAB_BYTES = 512 << 10;

// Rows (runs of the inner dim) of a slab; 0 unless it is the dim above the inner one that lies close in the storage.
template <class W>
uint32_t slab_rows(const Region& region) {
    if (region.ndim < 2) return 0;
    const Dim& outer = region.dims[region.ndim - 2];
    if (std::abs(outer.here) >= std::abs(region.inner().here)) return 0;
    const size_t fit = SLAB_BYTES / sizeof(W) / region.inner().n;
    return uint32_t(std::min<size_t>({fit, outer.n, 64 / sizeof(W)}));
}

// Copies `rows` runs of the inner dim from `at` on to `out`, dense; a few columns at a time.
template <class W>
void fill_slab(const W* at, uint32_t rows, int64_t row_stride, Dim inner, W* out) {
    constexpr uint32_t COLUMNS_AT_ONCE = 16;
    for (uint32_t start = 0; start < inner.n; start += std::min(COLUMNS_AT_ONCE, inner.n - start)) {
        const uint32_t columns = std::min(COLUMNS_AT_ONCE, inner.n - start);
        for (uint32_t row = 0; row < rows; ++row) {
            const W* from = at + int64_t(row) * row_stride + int64_t(start) * inner.here;
            W* to = out + size_t(row) * inner.n + start;
            for (uint32_t column = 0; column < columns; ++column) to[column] = from[int64_t(column) * inner.here];
        }
    }
}

template <class W, class F>
void for_slabs(const Region& region, uint32_t rows_at_once, F&& f) {
    const W* storage = reinterpret_cast<const W*>(region.data);
    const Dim& outer = region.dims[region.ndim - 2];
    const Dim& inner = region.inner();
    const std::unique_ptr<W[]> slab(new W[size_t(rows_at_once) * inner.n]);
    for (uint64_t from = 0; from < region.numel;) {
        const uint32_t done = uint32_t(from / inner.n % outer.n);
        const uint32_t rows = std::min(rows_at_once, outer.n - done);
        fill_slab(storage + Runs(region, uint32_t(from)).here(), rows, outer.here, inner, slab.get());
        const uint32_t count = rows * inner.n;
        for (uint32_t i = 0; i < count; i += PIECE)
            f(static_cast<const W*>(slab.get() + i), uint32_t(region.first + from + i), std::min(PIECE, count - i));
        from += count;
    }
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

template <class W, class F>
void for_copies(const Region& region, F&& f) {
    W copied[PIECE];
    for (uint64_t from = 0; from < region.numel; from += PIECE) {
        const uint32_t n = uint32_t(std::min<uint64_t>(PIECE, region.numel - from));
        fill(region, uint32_t(from), n, copied);
        f(static_cast<const W*>(copied), uint32_t(region.first + from), n);
    }
}

// Asks for the start of the run after the present one: no machine sees that jump coming.
inline void prefetch(const void* run, size_t bytes) {
    for (size_t line = 0; line < std::min<size_t>(bytes, 2048); line += 64)
        __builtin_prefetch(static_cast<const char*>(run) + line);
}

template <class W, class F>
void for_runs(const Region& region, uint32_t limit, F&& f) {
    const W* storage = reinterpret_cast<const W*>(region.data);
    Runs runs(region, 0), ahead(region, 0);
    for (uint64_t from = 0; from < region.numel; from += runs.count(), runs.next()) {
        ahead.next();
        prefetch(storage + ahead.here(), ahead.count() * sizeof(W));
        for (uint64_t i = 0; i < runs.count(); i += limit) {
            const uint32_t n = uint32_t(std::min<uint64_t>(limit, runs.count() - i));
            f(storage + runs.here() + int64_t(i), uint32_t(region.first + from + i), n);
        }
    }
}

// Calls f(const W* elements, uint32_t first, uint32_t n) for the region's pieces in order; `first` is a table number.
// Pieces hold at most PIECE elements or, where they lie in the storage itself, at most `limit`.
template <class W, class F>
void for_pieces(const Region& region, uint32_t limit, F&& f) {
    if (is_direct<W>(region)) return for_runs<W>(region, limit, f);
    if (const uint32_t rows = slab_rows<W>(region); rows > 1) return for_slabs<W>(region, rows, f);
    for_copies<W>(region, f);
}

}  // namespace dcr
