// Chunks: ascending positions of a table, a few dozen at a time, that lie in one run of one region.
#pragma once

#include <utility>

#include "table.hpp"

namespace dcr {

// Positions of a chunk. While one is worked on, the lines of as many more are on their way into L2: a core waits there for
// several times as many lines at once as in L1, so nothing is asked for in L1 itself.
constexpr size_t CHUNK = 64, FAR_CHUNK = 256;  // the latter where no element is touched

template <class W>
struct Chunk {
    const Region* region = nullptr;
    size_t from = 0, count = 0;      // which positions
    uint64_t here = 0, there = 0;  // number p lies at here + p * inner().here, in bytes and elements

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

// The chunks of ascending positions [K] of a table, in order.
template <class W>
class Chunks {
  public:
    // most: positions of a chunk.
    Chunks(const Table& table, const uint32_t* positions, size_t K, size_t most)
        : region_(table.regions.data()), positions_(positions), K_(K), most_(most) {}

    // The next chunk; its count is 0 at the end.
    Chunk<W> next() {
        if (from_ == K_) return {};
        if (from_ == to_) enter();
        const uint32_t* here = positions_ + from_;
        const Stretch stretch = locator_.next(here, std::min(most_, to_ - from_));
        const uint64_t origin = reinterpret_cast<uintptr_t>(region_->data) + stretch.here * sizeof(W);
        const Chunk<W> chunk{region_, from_, stretch.count, origin, stretch.there};
        from_ += stretch.count;
        return chunk;
    }

  private:
    // Goes to the region of positions_[from_].
    void enter() {
        while (positions_[from_] >= region_->end()) ++region_;
        to_ = region_->upto(positions_, from_, K_);
        locator_ = Locator(*region_);
    }

    const Region* region_;
    const uint32_t* positions_;
    size_t K_, most_, from_ = 0, to_ = 0;  // positions [from_, to_) are the rest of this region's
    Locator locator_;
};

// Asks for the lines of a chunk and, where a run is long, for a line of each page that the chunk after it should lie in:
// where a page is takes as long to find out as to fetch a line. Plain loops: gcc drops calls of what only prefetches.
template <class W>
[[gnu::always_inline]] inline void fetch(const Chunk<W>& chunk, const uint32_t* positions) {
    constexpr uint64_t PAGE = 4096, MOST_PAGES = 16;
    const uint32_t first = positions[chunk.from], last = positions[chunk.from + chunk.count - 1];
    const uint64_t step = uint64_t(chunk.region->inner().here) * sizeof(W);
    const uint64_t span = (last - first) * step;  // huge if the stride is negative
    const uint64_t after = chunk.here + last * step + span;  // a number: no pointer may leave the storage
    if (chunk.count == CHUNK && span <= MOST_PAGES * PAGE)
        for (uint64_t at = after; at < after + span; at += PAGE) __builtin_prefetch(reinterpret_cast<const char*>(at), 0, 2);
    for (size_t i = 0; i < chunk.count; ++i) __builtin_prefetch(chunk.at(positions[chunk.from + i], step), 0, 2);
}

// Calls f(chunk) for all positions in order. FETCH: their elements are going to be touched.
template <class W, bool FETCH = true, class F>
void for_chunks(const Table& table, const uint32_t* positions, size_t K, F&& f) {
    constexpr size_t MOST_AHEAD = 8;  // chunks, of short runs
    Chunks<W> chunks(table, positions, K, FETCH ? CHUNK : FAR_CHUNK);
    Chunk<W> ahead[MOST_AHEAD];
    size_t taken = 0, added = 0, waiting = 0;  // chunks, chunks, positions of those that are not taken
    const auto look_ahead = [&]() __attribute__((always_inline)) {
        while (waiting < CHUNK && added - taken < MOST_AHEAD) {
            const Chunk<W> next = chunks.next();
            if (next.count == 0) return;
            if (FETCH) fetch(next, positions);
            ahead[added++ % MOST_AHEAD] = next;
            waiting += next.count;
        }
    };
    for (look_ahead(); taken < added;) {
        const Chunk<W> now = ahead[taken++ % MOST_AHEAD];
        waiting -= now.count;
        look_ahead();
        f(now);
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
    for_chunks<W>(table, positions, K, [&](const Chunk<W>& chunk) {
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
