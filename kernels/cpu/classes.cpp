#include "classes.hpp"

#include <memory>
#include <stdexcept>
#include <string>

#include "level.hpp"
#include "table.hpp"

namespace dcr {
namespace {

template <class W>
struct Lowest {
    W of[CUTS];
    explicit Lowest(const uint8_t* cuts) {
        for (size_t c = 0; c < CUTS; ++c) {
            if (c > 0 && cuts[c] < cuts[c - 1]) throw std::invalid_argument("the cuts between classes do not ascend");
            of[c] = lowest_of<W>(cuts[c]);
        }
    }
};

template <class W>
void split_bits(const W* base, size_t N, const uint8_t* cuts, const uint32_t* positions, const W* values, size_t K,
                uint32_t* ranks, W* grouped, size_t* counts) {
    const Lowest<W> lowest(cuts);
    const std::unique_ptr<uint32_t[]> found(new uint32_t[K]);
    const std::unique_ptr<uint8_t[]> classes(new uint8_t[K]);
    level().classers->of<W>().rank(base, N, lowest.of, positions, K, found.get(), classes.get());
    size_t starts[CLASSES] = {};
    for (size_t c = 0; c < CLASSES; ++c) counts[c] = 0;
    for (size_t k = 0; k < K; ++k) ++counts[classes[k]];
    for (size_t c = 1; c < CLASSES; ++c) starts[c] = starts[c - 1] + counts[c - 1];
    for (size_t k = 0; k < K; ++k) {
        const size_t at = starts[classes[k]]++;
        ranks[at] = found[k];
        grouped[at] = values[k];
    }
}

template <class W>
void merge_bits(const W* base, size_t N, const uint8_t* cuts, const size_t* counts, const uint32_t* ranks,
                const W* values, uint32_t* positions, W* merged) {
    const Lowest<W> lowest(cuts);
    size_t ends[CLASSES], K = 0;
    for (size_t c = 0; c < CLASSES; ++c) {
        bool disorder = false;
        for (size_t i = K + 1; i < K + counts[c]; ++i) disorder |= ranks[i] <= ranks[i - 1];
        if (disorder) throw std::invalid_argument("the numbers in class " + std::to_string(c) + " do not ascend");
        ends[c] = K += counts[c];
    }
    const size_t found = level().classers->of<W>().merge(base, N, lowest.of, ends, ranks, values, positions, merged);
    if (found != K)
        throw std::invalid_argument("only " + std::to_string(found) + " of " + std::to_string(K) +
                                    " elements are where their classes say");
}

}  // namespace

void split(const void* base, size_t N, size_t width, const uint8_t* cuts, const uint32_t* positions,
           const void* values, size_t K, uint32_t* ranks, void* grouped, size_t* counts) {
    check_positions(positions, K, uint32_t(N));
    with_width(width, [&](auto zero) {
        using W = decltype(zero);
        split_bits(static_cast<const W*>(base), N, cuts, positions, static_cast<const W*>(values), K, ranks,
                   static_cast<W*>(grouped), counts);
    });
}

void merge(const void* base, size_t N, size_t width, const uint8_t* cuts, const size_t* counts, const uint32_t* ranks,
           const void* values, uint32_t* positions, void* merged) {
    with_width(width, [&](auto zero) {
        using W = decltype(zero);
        merge_bits(static_cast<const W*>(base), N, cuts, counts, ranks, static_cast<const W*>(values), positions,
                   static_cast<W*>(merged));
    });
}

}  // namespace dcr
