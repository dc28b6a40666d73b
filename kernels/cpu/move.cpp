// Moves between storages and dense arrays: all elements (read), or those at given positions (gather, scatter).
#include <atomic>
#include <cstring>

#include "kernels.hpp"
#include "level.hpp"
#include "pieces.hpp"

namespace dcr {
namespace {

// Positions that are located together; their lines are asked for before the first is touched.
constexpr size_t BATCH = 256;

// Calls f(W* const* addresses, from, n) for batches of at most BATCH positions, `from` counted in `positions`.
template <class W, bool WRITE, class F>
void for_addresses(const Table& table, const uint32_t* positions, size_t K, F&& f) {
    int64_t here[BATCH];
    W* addresses[BATCH];
    for_touched(table, positions, K, [&](const Region& region, size_t from, size_t to) {
        Locator locator(region);
        for (; from < to; from += BATCH) {
            const size_t n = std::min(BATCH, to - from);
            locator.locate(positions + from, n, here, nullptr);
            for (size_t i = 0; i < n; ++i) {
                addresses[i] = reinterpret_cast<W*>(region.data) + here[i];
                __builtin_prefetch(addresses[i], WRITE);
            }
            f(addresses, from, n);
        }
    });
}

template <class W>
size_t scatter_bits(const Table& table, const uint32_t* positions, const W* bits, size_t K) {
    for_addresses<W, true>(table, positions, K, [&](W* const* addresses, size_t from, size_t n) {
        for (size_t i = 0; i < n; ++i) *addresses[i] = bits[from + i];
    });
    // Two positions may share an element (boxes may overlap), so what was written is read only when all of it was.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    size_t wrong = 0;
    for_addresses<W, false>(table, positions, K, [&](W* const* addresses, size_t from, size_t n) {
        for (size_t i = 0; i < n; ++i) wrong += *addresses[i] != bits[from + i];
    });
    return wrong;
}

template <class W>
void gather_bits(const Table& table, const uint32_t* positions, size_t K, W* out) {
    for_addresses<W, false>(table, positions, K, [&](W* const* addresses, size_t from, size_t n) {
        for (size_t i = 0; i < n; ++i) out[from + i] = *addresses[i];
    });
}

template <class W>
void read_bits(const Table& table, W* out) {
    for (const Region& region : table.regions) {
        if (!is_direct<W>(region)) {
            fill(region, 0, region.numel, out + region.first);
            continue;
        }
        for_pieces<W>(region, region.numel, [&](const W* run, uint32_t first, uint32_t n) {
            std::memcpy(out + first, run, n * sizeof(W));
        });
    }
}

void read_cast(const Table& table, int kind, uint16_t* out) {
    const Spans& spans = *level().spans;
    for (const Region& region : table.regions)
        for_pieces<uint32_t>(region, region.numel, [&](const uint32_t* wide, uint32_t first, uint32_t n) {
            spans.cast(wide, n, kind, out + first);
        });
}

}  // namespace

void read(const Table& table, int kind, void* out) {
    if (kind != NONE) return read_cast(table, kind, static_cast<uint16_t*>(out));
    with_width(table.width, [&](auto zero) { read_bits(table, static_cast<decltype(zero)*>(out)); });
}

void gather(const Table& table, const uint32_t* positions, size_t K, void* out) {
    with_width(table.width, [&](auto zero) { gather_bits(table, positions, K, static_cast<decltype(zero)*>(out)); });
}

size_t scatter(const Table& table, const uint32_t* positions, const void* bits, size_t K) {
    return with_width(table.width, [&](auto zero) {
        return scatter_bits(table, positions, static_cast<const decltype(zero)*>(bits), K);
    });
}

}  // namespace dcr
