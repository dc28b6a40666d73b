// Tables of strided regions: what every kernel walks over. The C++ side of dcr/layout/views.py.
//
//     B  rows of a table      N  elements of a table, numbered over its rows      K  positions (numbers, ascending)
//
// A table is checked once, when it is built: afterwards no kernel can leave a storage. All offsets and strides are in
// elements and 64-bit; numbers are 32-bit, because N < 2^32.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

static_assert(std::endian::native == std::endian::little, "bits are compared in memory order: little endian only");

namespace dcr {

constexpr int MAX_DIMS = 6;
constexpr int COLUMNS = 5 + 3 * MAX_DIMS;

// A one-dimensional array of bits that python lent us.
struct Array {
    void* data = nullptr;
    size_t size = 0;   // elements
    size_t width = 1;  // bytes per element
    bool writeable = false;
};

struct Dim {
    uint32_t n;
    int64_t here;    // stride in the storage
    uint64_t there;  // stride in canonical coordinates, modulo 2^64
};

// One row of a table, with dims of one index dropped and adjacent dims merged: never empty, at least one dim.
struct Region {
    char* data;      // the storage
    int64_t here0;   // first element in the storage
    uint64_t there0; // its canonical index, modulo 2^64
    uint32_t first;  // its number within the table
    uint32_t numel;
    int64_t tensor;
    int ndim;
    Dim dims[MAX_DIMS];

    const Dim& inner() const { return dims[ndim - 1]; }
    uint64_t end() const { return uint64_t(first) + numel; }
    // The end of this region's part of ascending positions [from, K).
    size_t upto(const uint32_t* positions, size_t from, size_t K) const {
        if (positions[K - 1] < end()) return K;
        return size_t(std::lower_bound(positions + from, positions + K, end()) - positions);
    }
};

// What a kernel is going to follow. A side that is not followed gets strides of 0, so that more dims merge.
enum class Follow {
    HERE,   // the storage, in numbering order
    THERE,  // canonical coordinates, in numbering order
    BOTH,   // both, in numbering order
    SCAN,   // both, in the storage's order: numbers within a region mean nothing then
};

struct Table {
    std::vector<Region> regions;  // empty rows are left out
    size_t width = 0;             // bytes per element; 0 if there are no storages
    uint32_t numel = 0;           // N

    // rows: int64 [B, COLUMNS]; tensors: how many tensors column TENSOR may name, or -1 for any.
    // Throws std::invalid_argument: widths differ, a row leaves its storage or names a missing tensor, a storage that
    // is to be written is read-only, or the table holds 2^32 elements or more.
    Table(const std::vector<Array>& storages, const int64_t* rows, size_t B, Follow follow, int64_t tensors = -1,
          bool write = false);

    // True if no two numbers share an element of memory. Sufficient: regions that interleave count as sharing.
    bool is_injective() const;
};

// Walks the elements of one region in numbering order, one run (a piece of the innermost dim) at a time.
class Runs {
  public:
    Runs() = default;  // to be assigned to
    // Starts at `number`, counted from the region's first element.
    Runs(const Region& region, uint32_t number) : region_(&region) { seek(number); }

    // The present run: `count` elements (at least one) from `here`/`there` on, at the strides of region.inner().
    int64_t here() const { return here_; }
    uint64_t there() const { return there_; }
    uint32_t count() const { return count_; }

    // Goes to the first element of the next run; past the last one the walk wraps round.
    void next() {
        const Dim& inner = region_->inner();
        const uint32_t done = inner.n - count_;  // of this run, before `here`
        here_ -= int64_t(done) * inner.here;
        there_ -= uint64_t(done) * inner.there;
        count_ = inner.n;
        for (int d = region_->ndim - 2; d >= 0; --d) {
            const Dim& dim = region_->dims[d];
            if (++index_[d] < dim.n) {
                here_ += dim.here;
                there_ += dim.there;
                return;
            }
            index_[d] = 0;
            here_ -= int64_t(dim.n - 1) * dim.here;
            there_ -= uint64_t(dim.n - 1) * dim.there;
        }
    }

    void seek(uint32_t number) {
        here_ = region_->here0;
        there_ = region_->there0;
        for (int d = region_->ndim - 1; d > 0; --d) {
            index_[d] = number % region_->dims[d].n;
            number /= region_->dims[d].n;
        }
        index_[0] = number;
        for (int d = 0; d < region_->ndim; ++d) {
            here_ += int64_t(index_[d]) * region_->dims[d].here;
            there_ += uint64_t(index_[d]) * region_->dims[d].there;
        }
        count_ = region_->inner().n - index_[region_->ndim - 1];
    }

  private:
    const Region* region_ = nullptr;
    int64_t here_ = 0;
    uint64_t there_ = 0;
    uint32_t count_ = 0;
    uint32_t index_[MAX_DIMS] = {};
};

// Ascending numbers of one region that lie in one run: number p of the table lies at here + p * inner().here in the
// storage and is canonical element there + p * inner().there (both modulo 2^64).
struct Stretch {
    size_t count;  // at least 1
    uint64_t here, there;
};

// Where ascending numbers of one region lie, a stretch at a time: one division per run that is entered by a jump.
class Locator {
  public:
    Locator() = default;  // to be assigned to
    explicit Locator(const Region& region) : region_(&region), runs_(region, 0), end_(region.inner().n) {}

    // The stretch that positions [count] start with; they ascend from call to call, too.
    Stretch next(const uint32_t* positions, size_t count) {
        const uint32_t first = region_->first;
        if (positions[0] - first >= end_) enter(positions[0] - first);
        size_t n = count;
        if (positions[count - 1] - first >= end_)
            for (n = 1; positions[n] - first < end_; ++n) {}
        const uint64_t start = uint64_t(first) + start_;
        return {n, uint64_t(runs_.here()) - start * uint64_t(region_->inner().here),
                runs_.there() - start * region_->inner().there};
    }

  private:
    void enter(uint32_t number) {
        const uint32_t n = region_->inner().n;
        if (number - end_ < n) {
            runs_.next();
            start_ = uint32_t(end_);
        } else {
            start_ = number - number % n;
            runs_.seek(start_);
        }
        end_ = uint64_t(start_) + n;
    }

    const Region* region_ = nullptr;
    Runs runs_;
    uint32_t start_ = 0;  // the number at which the present run starts
    uint64_t end_ = 0;    // and ends
};

// out [n]: start + p * stride for each position.
inline void spread(const uint32_t* positions, size_t n, uint64_t start, uint64_t stride, uint64_t* out) {
    if (stride == 1)
        for (size_t i = 0; i < n; ++i) out[i] = start + positions[i];
    else
        for (size_t i = 0; i < n; ++i) out[i] = start + positions[i] * stride;
}

// Throws std::invalid_argument unless positions [K] ascend strictly and lie below `numel`.
void check_positions(const uint32_t* positions, size_t K, uint32_t numel);

// Calls f with a zero of the unsigned type of `width` bytes (1, 2, 4 or 8).
template <class F>
decltype(auto) with_width(size_t width, F&& f) {
    switch (width) {
        case 1: return f(uint8_t{});
        case 2: return f(uint16_t{});
        case 4: return f(uint32_t{});
        default: return f(uint64_t{});
    }
}

}  // namespace dcr
