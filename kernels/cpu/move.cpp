// Moves between storages and dense arrays: all elements (read), or those at given positions (gather, scatter).
#include <atomic>
#include <cstring>

#include "chunks.hpp"
#include "kernels.hpp"
#include "level.hpp"
#include "pieces.hpp"

namespace dcr {
namespace {

template <class W>
void write(const Chunk<W>& chunk, const uint32_t* positions, const W* bits) {
    chunk.each(positions, [bits = bits + chunk.from](W& element, size_t i) { element = bits[i]; });
}

template <class W>
size_t count_wrong(const Chunk<W>& chunk, const uint32_t* positions, const W* bits) {
    size_t wrong = 0;
    chunk.each(positions, [&](const W& element, size_t i) { wrong += element != bits[chunk.from + i]; });
    return wrong;
}

// A chunk is read back when the one after it has been written: not while its own writes are still on their way.
template <class W>
size_t scatter_apart(const Table& table, const uint32_t* positions, const W* bits, size_t K) {
    size_t wrong = 0;
    Chunk<W> before;
    for_chunks<W>(table, positions, K, [&](const Chunk<W>& chunk) {
        write(chunk, positions, bits);
        std::atomic_signal_fence(std::memory_order_seq_cst);
        if (before.count) wrong += count_wrong(before, positions, bits);
        before = chunk;
    });
    return before.count ? wrong + count_wrong(before, positions, bits) : wrong;
}

// Where two positions may share an element, nothing is read before all is written.
template <class W>
size_t scatter_bits(const Table& table, const uint32_t* positions, const W* bits, size_t K) {
    if (table.is_injective()) return scatter_apart(table, positions, bits, K);
    for_chunks<W>(table, positions, K, [&](const Chunk<W>& chunk) { write(chunk, positions, bits); });
    std::atomic_signal_fence(std::memory_order_seq_cst);
    size_t wrong = 0;
    for_chunks<W>(table, positions, K, [&](const Chunk<W>& chunk) { wrong += count_wrong(chunk, positions, bits); });
    return wrong;
}

template <class W>
void gather_bits(const Table& table, const uint32_t* positions, size_t K, W* out) {
    for_chunks<W>(table, positions, K, [&](const Chunk<W>& chunk) {
        chunk.each(positions, [out = out + chunk.from](const W& element, size_t i) { out[i] = element; });
    });
}

template <class W>
void read_bits(const Table& table, W* out) {
    for (const Region& region : table.regions)
        for_pieces<W>(region, region.numel, [&](const W* elements, uint32_t first, uint32_t n) {
            std::memcpy(out + first, elements, n * sizeof(W));
        });
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
