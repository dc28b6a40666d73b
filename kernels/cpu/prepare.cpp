#include "chunks.hpp"
#include "kernels.hpp"
#include "keys.hpp"
#include "level.hpp"

namespace dcr {
namespace {

template <class W>
void resolve(const W* old, const W* values, size_t n, Operation operation, W* now) {
    switch (operation) {
        case Operation::OVERWRITE:
            for (size_t i = 0; i < n; ++i) now[i] = values[i];
            return;
        case Operation::XOR:
            for (size_t i = 0; i < n; ++i) now[i] = W(values[i] ^ old[i]);
            return;
        case Operation::STEP:
            for (size_t i = 0; i < n; ++i) now[i] = W(values[i] + old[i]);
            return;
    }
}

template <class W>
void prepare_bits(const Table& table, const uint64_t* keys, const uint32_t* positions, const W* values, size_t K,
                  Operation operation, W* old, W* now, uint64_t* old_sums, uint64_t* new_sums) {
    const Span<W>& span = level().spans->of<W>();
    for_indices<W>(
        table, positions, K,
        [&](const Chunk<W>& chunk) {
            chunk.each(positions, [out = old + chunk.from](const W& element, size_t i) { out[i] = element; });
        },
        [&](const Indices& indices) {
            const W* before = old + indices.from;
            W* after = now + indices.from;
            resolve(before, values + indices.from, indices.count, operation, after);
            const Key key = key_of(*indices.region, keys);
            const Pair sums = span.digest_both(before, after, indices.count, indices.there, key);
            add(*indices.region, sums.old, old_sums);
            add(*indices.region, sums.now, new_sums);
        });
}

}  // namespace

void prepare(const Table& table, const uint64_t* keys, const uint32_t* positions, const void* values, size_t K,
             Operation operation, void* old, void* now, uint64_t* old_sums, uint64_t* new_sums) {
    with_width(table.width, [&](auto zero) {
        using W = decltype(zero);
        prepare_bits(table, keys, positions, static_cast<const W*>(values), K, operation, static_cast<W*>(old),
                     static_cast<W*>(now), old_sums, new_sums);
    });
}

}  // namespace dcr
