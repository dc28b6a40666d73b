#include <algorithm>
#include <stdexcept>
#include <string>

#include "kernels.hpp"

namespace dcr {
namespace {

void check_run(const int64_t* run, size_t index, int64_t free_from, int64_t held) {
    if (run[0] < free_from || run[1] < 0 || run[0] > UINT32_MAX || run[1] > UINT32_MAX - held)
        throw std::invalid_argument("run " + std::to_string(index) + " of " + std::to_string(run[1]) +
                                    " elements from " + std::to_string(run[0]) +
                                    " on: runs must ascend, without overlap, and hold fewer than 2^32 elements");
}

// The first of ascending positions [from, K) that is not below `limit`: near `from` more often than not.
size_t reach(const uint32_t* positions, size_t from, size_t K, uint64_t limit) {
    size_t step = 1, low = from;
    while (low + step <= K && positions[low + step - 1] < limit) {
        low += step;
        step *= 2;
    }
    return size_t(std::lower_bound(positions + low, positions + std::min(K, low + step), limit) - positions);
}

}  // namespace

Selection plan_selection(const uint32_t* positions, size_t K, const int64_t* runs, size_t R) {
    Selection selection;
    int64_t free_from = 0, held = 0;
    size_t from = 0;
    for (size_t r = 0; r < R; ++r) {
        const int64_t* run = runs + 2 * r;
        check_run(run, r, free_from, held);
        free_from = run[0] + run[1];
        from = reach(positions, from, K, uint64_t(run[0]));
        const size_t to = reach(positions, from, K, uint64_t(free_from));
        if (to > from) selection.parts.push_back({from, to, uint32_t(run[0] - held)});
        selection.size += to - from;
        held += run[1];
        from = to;
    }
    return selection;
}

void select(const Selection& selection, const uint32_t* positions, uint32_t* indices, uint32_t* local) {
    for (const Selection::Part& part : selection.parts) {
        for (size_t i = part.from; i < part.to; ++i) {
            *indices++ = uint32_t(i);
            *local++ = positions[i] - part.shift;
        }
    }
}

}  // namespace dcr
