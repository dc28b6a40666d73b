#include "table.hpp"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>

#include "level.hpp"

namespace dcr {
namespace {

__extension__ using Wide = __int128;  // extents are below 2^32 and strides 64-bit: bounds cannot overflow it

// The columns of a row; see dcr/layout/views.py.
enum Column { STORAGE, HERE, TENSOR, THERE, NDIM, SIZES };

[[noreturn]] void refuse(size_t row, const std::string& why) {
    throw std::invalid_argument("row " + std::to_string(row) + " " + why);
}

// Elements of a row's box; 0 if any extent is 0. Stops at 2^32, which no table may hold.
uint64_t count(const int64_t* row, size_t index) {
    const int64_t ndim = row[NDIM];
    if (ndim < 0 || ndim > MAX_DIMS) refuse(index, "has " + std::to_string(ndim) + " dimensions; 0 to 6 are supported");
    const int64_t* sizes = row + SIZES;
    bool empty = false;
    for (int d = 0; d < ndim; ++d) {
        if (sizes[d] < 0) refuse(index, "has a negative extent");
        empty |= sizes[d] == 0;
    }
    if (empty) return 0;
    uint64_t numel = 1;
    for (int d = 0; d < ndim; ++d) {
        if (__builtin_mul_overflow(numel, uint64_t(sizes[d]), &numel) || numel >> 32)
            refuse(index, "alone holds 2^32 elements or more: positions are 32-bit, split it into frames");
    }
    return numel;
}

void check_bounds(const int64_t* row, size_t index, const Array& storage) {
    Wide low = row[HERE], high = row[HERE];
    for (int d = 0; d < row[NDIM]; ++d) {
        const Wide reach = Wide(row[SIZES + d] - 1) * row[SIZES + MAX_DIMS + d];
        (reach < 0 ? low : high) += reach;
    }
    if (low < 0 || high >= Wide(storage.size))
        refuse(index, "leaves storage " + std::to_string(row[STORAGE]) + ", which has " + std::to_string(storage.size) +
                          " elements");
}

// A side that stands still (stride 0) merges too: 0 == 0 * n.
bool merges(const Dim& outer, const Dim& inner) {
    return uint64_t(outer.here) == uint64_t(inner.here) * inner.n && outer.there == inner.there * inner.n;
}

Region region_of(const int64_t* row, Follow follow) {
    Dim dims[MAX_DIMS];
    int ndim = 0;
    for (int d = 0; d < row[NDIM]; ++d) {
        const int64_t* column = row + SIZES + d;
        if (column[0] == 1) continue;
        dims[ndim++] = {uint32_t(column[0]), follow == Follow::THERE ? 0 : column[MAX_DIMS],
                        follow == Follow::HERE ? 0 : uint64_t(column[2 * MAX_DIMS])};
    }
    if (follow == Follow::SCAN)
        std::stable_sort(dims, dims + ndim,
                         [](const Dim& a, const Dim& b) { return std::abs(a.here) > std::abs(b.here); });

    Region region{};
    region.here0 = row[HERE];
    region.there0 = uint64_t(row[THERE]);
    region.tensor = row[TENSOR];
    for (int d = 0; d < ndim; ++d) {
        Dim& last = region.dims[std::max(0, region.ndim - 1)];
        if (region.ndim && merges(last, dims[d]))
            last = {last.n * dims[d].n, dims[d].here, dims[d].there};
        else
            region.dims[region.ndim++] = dims[d];
    }
    if (region.ndim == 0) region.dims[region.ndim++] = {1, 1, 1};
    return region;
}

}  // namespace

Table::Table(const std::vector<Array>& storages, const int64_t* rows, size_t B, Follow follow, int64_t tensors,
             bool write) {
    for (const Array& storage : storages) {
        if (storage.width != storages.front().width)
            throw std::invalid_argument("the storages of one table must have one width, found " +
                                        std::to_string(storages.front().width) + " and " +
                                        std::to_string(storage.width));
    }
    width = storages.empty() ? 0 : storages.front().width;
    regions.reserve(B);
    uint64_t total = 0;
    for (size_t i = 0; i < B; ++i) {
        const int64_t* row = rows + i * COLUMNS;
        if (row[STORAGE] < 0 || uint64_t(row[STORAGE]) >= storages.size())
            refuse(i, "names storage " + std::to_string(row[STORAGE]) + " of " + std::to_string(storages.size()));
        if (tensors >= 0 && (row[TENSOR] < 0 || row[TENSOR] >= tensors))
            refuse(i, "names tensor " + std::to_string(row[TENSOR]) + " of " + std::to_string(tensors));
        const uint64_t size = count(row, i);
        if (size == 0) continue;
        const Array& storage = storages[size_t(row[STORAGE])];
        check_bounds(row, i, storage);
        if (write && !storage.writeable)
            refuse(i, "would write to storage " + std::to_string(row[STORAGE]) + ", which is read-only");
        Region region = region_of(row, follow);
        region.data = static_cast<char*>(storage.data);
        region.first = uint32_t(total);
        region.numel = uint32_t(size);
        regions.push_back(region);
        total += size;
        if (total >> 32)
            throw std::invalid_argument("a table of 2^32 elements or more: positions are 32-bit, split it into frames");
    }
    numel = uint32_t(total);
}

bool Table::is_injective() const {
    std::vector<std::pair<uintptr_t, uintptr_t>> spans;  // addresses: first byte, and the one behind the last
    spans.reserve(regions.size());
    for (const Region& region : regions) {
        std::vector<std::pair<uint64_t, uint64_t>> strides(region.ndim);  // with their extents
        uintptr_t low = uintptr_t(region.data) + uint64_t(region.here0) * width;
        for (int d = 0; d < region.ndim; ++d) {
            const Dim& dim = region.dims[d];
            strides[d] = {uint64_t(std::abs(dim.here)), dim.n};
            if (dim.here < 0) low -= strides[d].first * (dim.n - 1) * width;
        }
        std::sort(strides.begin(), strides.end());
        uint64_t reach = 0;
        for (int d = 0; d < region.ndim; ++d) {
            if (strides[d].first <= reach && strides[d].second > 1) return false;
            reach += strides[d].first * (strides[d].second - 1);
        }
        spans.push_back({low, low + (reach + 1) * width});
    }
    std::sort(spans.begin(), spans.end());
    for (size_t i = 1; i < spans.size(); ++i)
        if (spans[i].first < spans[i - 1].second) return false;
    return true;
}

void check_positions(const uint32_t* positions, size_t K, uint32_t numel) {
    if (K == 0) return;
    if (!level().coders->ascend(positions, K)) throw std::invalid_argument("positions must ascend strictly");
    if (positions[K - 1] >= numel)
        throw std::invalid_argument("position " + std::to_string(positions[K - 1]) + " in a table of " +
                                    std::to_string(numel) + " elements");
}

}  // namespace dcr
