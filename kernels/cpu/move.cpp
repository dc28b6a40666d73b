// Moves between storages and dense arrays: all elements (read), or those at given positions (gather, scatter).
#include <atomic>
#include <cstring>
#include <optional>
#include <utility>

#include "kernels.hpp"
#include "level.hpp"
#include "pieces.hpp"

namespace dcr {
namespace {

// Where the elements at ascending positions lie, a batch at a time, across regions.
template <class W>
class Addresses {
  public:
    static constexpr size_t BATCH = 64;

    Addresses(const Table& table, const uint32_t* positions, size_t K)
        : region_(table.regions.data()), positions_(positions), K_(K) {}

    // Writes the next addresses to out [BATCH]; returns how many, 0 at the end.
    size_t next(W** out) {
        size_t n = 0;
        while (n < BATCH && from_ < K_) {
            if (from_ == to_) enter();
            const size_t taken = std::min(BATCH - n, to_ - from_);
            int64_t here[BATCH];
            locator_->locate(positions_ + from_, taken, here, nullptr);
            for (size_t i = 0; i < taken; ++i) out[n + i] = reinterpret_cast<W*>(region_->data) + here[i];
            n += taken;
            from_ += taken;
        }
        return n;
    }

  private:
    // Goes to the region of positions_[from_].
    void enter() {
        while (positions_[from_] >= region_->end()) ++region_;
        to_ = region_->upto(positions_, from_, K_);
        locator_.emplace(*region_);
    }

    const Region* region_;
    const uint32_t* positions_;
    size_t K_, from_ = 0, to_ = 0;  // positions [from_, to_) are the rest of this region's
    std::optional<Locator> locator_;
};

// Calls f(W* element, i) for all positions in order, i counted in `positions`. While a batch is worked on, the lines
// of the next one are on their way.
template <class W, bool WRITE, class F>
void for_elements(const Table& table, const uint32_t* positions, size_t K, F&& f) {
    Addresses<W> addresses(table, positions, K);
    W* batches[2][Addresses<W>::BATCH];
    W **now = batches[0], **next = batches[1];
    size_t done = 0;
    for (size_t n = addresses.next(now); n;) {
        const size_t following = addresses.next(next);
        for (size_t i = 0; i < following; ++i) __builtin_prefetch(next[i], WRITE);
        for (size_t i = 0; i < n; ++i) f(now[i], done + i);
        done += n;
        n = following;
        std::swap(now, next);
    }
}

template <class W>
size_t scatter_bits(const Table& table, const uint32_t* positions, const W* bits, size_t K) {
    for_elements<W, true>(table, positions, K, [&](W* element, size_t i) { *element = bits[i]; });
    // Two positions may share an element (boxes may overlap), so what was written is read only when all of it was.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    size_t wrong = 0;
    for_elements<W, false>(table, positions, K, [&](W* element, size_t i) { wrong += *element != bits[i]; });
    return wrong;
}

template <class W>
void gather_bits(const Table& table, const uint32_t* positions, size_t K, W* out) {
    for_elements<W, false>(table, positions, K, [&](W* element, size_t i) { out[i] = *element; });
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
