#include <algorithm>

#include "chunks.hpp"
#include "kernels.hpp"
#include "keys.hpp"
#include "level.hpp"
#include "pieces.hpp"

namespace dcr {
namespace {

// Calls f(const W* elements, n, canonical index of the first) for dense pieces of runs, at most PIECE elements each.
template <class W, class F>
void for_run_pieces(const Region& region, F&& f) {
    const W* storage = reinterpret_cast<const W*>(region.data);
    const Dim& inner = region.inner();
    W copied[PIECE];
    Runs runs(region, 0);
    for (uint64_t from = 0; from < region.numel; from += runs.count(), runs.next()) {
        for (uint64_t i = 0; i < runs.count(); i += PIECE) {
            const uint32_t n = uint32_t(std::min<uint64_t>(PIECE, runs.count() - i));
            const W* elements = storage + (runs.here() + int64_t(i) * inner.here);
            if (inner.here != 1) {
                for (uint32_t j = 0; j < n; ++j) copied[j] = elements[int64_t(j) * inner.here];
                elements = copied;
            }
            f(elements, n, runs.there() + i * inner.there);
        }
    }
}

template <class W>
void digest_bits(const Table& table, const uint64_t* keys, uint64_t* sums) {
    const Span<W>& span = level().spans->of<W>();
    for (const Region& region : table.regions) {
        const Key key = key_of(region, keys);
        for_run_pieces<W>(region, [&](const W* elements, uint32_t n, uint64_t there) {
            add(region, span.digest(elements, n, there, region.inner().there, key), sums);
        });
    }
}

void digest_cast(const Table& table, const uint64_t* keys, int kind, uint64_t* sums) {
    const Spans& spans = *level().spans;
    for (const Region& region : table.regions) {
        const Key key = key_of(region, keys);
        for_run_pieces<uint32_t>(region, [&](const uint32_t* wide, uint32_t n, uint64_t there) {
            uint16_t cast[PIECE];
            spans.cast(wide, n, kind, cast);
            add(region, spans.w2.digest(cast, n, there, region.inner().there, key), sums);
        });
    }
}

template <class W>
void digest_positions(const Table& table, const uint64_t* keys, const uint32_t* positions, const W* bits, size_t K,
                      uint64_t* sums) {
    const Span<W>& span = level().spans->of<W>();
    for_chunks<W, false>(table, positions, K, [&](const Chunk<W>& chunk) {
        const Region& region = *chunk.region;
        add(region, span.digest_at(bits + chunk.from, chunk.count, positions + chunk.from, chunk.there,
                                   region.inner().there, key_of(region, keys)), sums);
    });
}

template <class W>
void digest_positions(const Table& table, const uint64_t* keys, const uint32_t* positions, const W* old, const W* now,
                      size_t K, uint64_t* old_sums, uint64_t* new_sums) {
    const Span<W>& span = level().spans->of<W>();
    for_chunks<W, false>(table, positions, K, [&](const Chunk<W>& chunk) {
        const Region& region = *chunk.region;
        const Pair sums = span.digest_both_at(old + chunk.from, now + chunk.from, chunk.count, positions + chunk.from,
                                              chunk.there, region.inner().there, key_of(region, keys));
        add(region, sums.old, old_sums);
        add(region, sums.now, new_sums);
    });
}

}  // namespace

void digest(const Table& table, const uint64_t* keys, int kind, uint64_t* sums) {
    if (kind != NONE) return digest_cast(table, keys, kind, sums);
    with_width(table.width, [&](auto zero) { digest_bits<decltype(zero)>(table, keys, sums); });
}

void digest_at(const Table& table, const uint64_t* keys, const uint32_t* positions, const void* bits, size_t width,
               size_t K, uint64_t* sums) {
    with_width(width, [&](auto zero) {
        digest_positions(table, keys, positions, static_cast<const decltype(zero)*>(bits), K, sums);
    });
}

void digest_both(const Table& table, const uint64_t* keys, const uint32_t* positions, const void* old, const void* now,
                 size_t width, size_t K, uint64_t* old_sums, uint64_t* new_sums) {
    with_width(width, [&](auto zero) {
        using W = decltype(zero);
        digest_positions(table, keys, positions, static_cast<const W*>(old), static_cast<const W*>(now), K, old_sums,
                         new_sums);
    });
}

}  // namespace dcr
