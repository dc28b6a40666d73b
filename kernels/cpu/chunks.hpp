// Chunks: ascending positions of a table, a few dozen at a time, that lie in one run of one region.
#pragma once

#include <utility>

#include "table.hpp"

namespace dcr {

// Positions of a chunk: enough for the machine to wait for many cache lines at once. Where changes are so close that all
// lines are fetched in order sooner than the ones that are needed, a chunk is short, and the lines of the next one are
// asked for while one is worked on. (To ask for single lines gains nothing, and hinders the machine's own prefetchers.)
constexpr size_t CHUNK = 256, CLOSE_CHUNK = 64, CLOSE_BYTES = 128 * CLOSE_CHUNK;

template <class W>
struct Chunk {
    const Region* region;
    size_t from, count;  // which positions
    uint64_t here, there;  // number p lies at here + p * inner().here, in bytes and elements

    // Calls f(W& element, i) for each of them, i counted from `from`.
    template <class F>
    [[gnu::always_inline]] void each(const uint32_t* positions, F&& f) const {
        const uint64_t step = uint64_t(region->inner().here) * sizeof(W);
        if (step == sizeof(W))
            for (size_t i = 0; i < count; ++i) f(*at(positions[from + i], sizeof(W)), i);
        else
            for (size_t i = 0; i < count; ++i) f(*at(positions[from + i], step), i);
    }
    W* at(uint32_t position, uint64_t step) const { return reinterpret_cast<W*>(here + position * step); }
};

// Asks for all lines from one element to another. Inlined, because gcc drops calls of what only prefetches.
template <class W, bool WRITE>
[[gnu::always_inline]] inline void fetch(const W* first, const W* last) {
    const char *line = reinterpret_cast<const char*>(first), *end = reinterpret_cast<const char*>(last);
    if (end - line <= ptrdiff_t(CLOSE_BYTES))
        for (; line <= end; line += 64) __builtin_prefetch(line, WRITE);
}

// Calls f(chunk) for all positions in order. WRITE: their elements are going to be written.
template <class W, bool WRITE, class F>
void for_chunks(const Table& table, const uint32_t* positions, size_t K, F&& f) {
    size_t from = 0;
    for (const Region& region : table.regions) {
        if (from == K) return;
        if (positions[from] >= region.end()) continue;
        const size_t to = region.upto(positions, from, K);
        const uint64_t step = uint64_t(region.inner().here) * sizeof(W);
        Locator locator(region);
        while (from < to) {
            const uint32_t* here = positions + from;
            const bool close =
                from + CLOSE_CHUNK < to && here[CLOSE_CHUNK] - here[0] <= uint32_t(CLOSE_BYTES / sizeof(W));
            const Stretch stretch = locator.next(here, std::min(close ? 2 * CLOSE_CHUNK : CHUNK, to - from));
            const size_t count = close ? std::min(stretch.count, CLOSE_CHUNK) : stretch.count;
            const uint64_t origin = reinterpret_cast<uintptr_t>(region.data) + stretch.here * sizeof(W);
            const Chunk<W> chunk{&region, from, count, origin, stretch.there};
            if (stretch.count > count)
                fetch<W, WRITE>(chunk.at(here[count], step), chunk.at(here[stretch.count - 1], step));
            f(chunk);
            from += count;
        }
    }
}

// Canonical elements of positions of one region, over as many chunks as fit.
struct Indices {
    const Region* region;
    size_t from, count;  // which positions
    uint64_t there[CHUNK];
};

// Calls f(chunk) for all positions in order and, when enough have come together, g(indices) for those since the last time.
template <class W, class F, class G>
void for_indices(const Table& table, const uint32_t* positions, size_t K, F&& f, G&& g) {
    Indices indices{};
    const auto flush = [&] {
        if (indices.count) g(static_cast<const Indices&>(indices));
        indices.from += std::exchange(indices.count, 0);
    };
    for_chunks<W, false>(table, positions, K, [&](const Chunk<W>& chunk) {
        if (indices.region != chunk.region || indices.count + chunk.count > CHUNK) flush();
        indices.region = chunk.region;
        f(chunk);
        spread(positions + chunk.from, chunk.count, chunk.there, chunk.region->inner().there,
               indices.there + indices.count);
        indices.count += chunk.count;
    });
    flush();
}

}  // namespace dcr
