#include <algorithm>
#include <cstring>

#include "kernels.hpp"
#include "level.hpp"
#include "pieces.hpp"

namespace dcr {
namespace {

// Changes of one block: large enough that few are needed, small enough that the last, half empty one is cheap.
constexpr size_t BLOCK = 16 * PIECE;

template <class W>
void compare_piece(const Span<W>& span, const W* now, const W* base, uint32_t first, uint32_t n, Changes& found) {
    found.reserve(n);
    found.added(span.compare(now, base + first, n, first, found.positions(), static_cast<W*>(found.bits()),
                             static_cast<W*>(found.old())));
}

template <class W>
void compare_bits(const Table& table, const W* base, Changes& found) {
    const Span<W>& span = level().spans->of<W>();
    for (const Region& region : table.regions)
        for_pieces<W>(region, PIECE, [&](const W* now, uint32_t first, uint32_t n) {
            compare_piece(span, now, base, first, n, found);
        });
}

void compare_cast(const Table& table, const uint16_t* base, int kind, Changes& found) {
    const Spans& spans = *level().spans;
    for (const Region& region : table.regions)
        for_pieces<uint32_t>(region, PIECE, [&](const uint32_t* wide, uint32_t first, uint32_t n) {
            uint16_t now[PIECE];
            spans.cast(wide, n, kind, now);
            compare_piece(spans.w2, now, base, first, n, found);
        });
}

}  // namespace

void Changes::reserve(size_t n) {
    if (!blocks_.empty() && BLOCK - blocks_.back().used >= n) return;
    const auto bytes = [&] { return std::unique_ptr<char[]>(new char[(BLOCK + SLACK) * width_]); };
    blocks_.push_back({std::unique_ptr<uint32_t[]>(new uint32_t[BLOCK + SLACK]), bytes(), bytes(), 0});
}

uint32_t* Changes::positions() const { return blocks_.back().positions.get() + blocks_.back().used; }

void* Changes::bits() const { return blocks_.back().bits.get() + blocks_.back().used * width_; }

void* Changes::old() const { return blocks_.back().old.get() + blocks_.back().used * width_; }

void Changes::take(uint32_t* positions, void* bits, void* old) {
    size_t taken = 0;
    for (Block& block : blocks_) {
        std::memcpy(positions + taken, block.positions.get(), block.used * sizeof(uint32_t));
        std::memcpy(static_cast<char*>(bits) + taken * width_, block.bits.get(), block.used * width_);
        std::memcpy(static_cast<char*>(old) + taken * width_, block.old.get(), block.used * width_);
        taken += block.used;
        block = {};
    }
    blocks_.clear();
    size_ = 0;
}

Changes compare(const Table& table, const void* base, int kind) {
    Changes found(width_after(kind, table.width));
    if (kind != NONE)
        compare_cast(table, static_cast<const uint16_t*>(base), kind, found);
    else
        with_width(table.width, [&](auto zero) {
            compare_bits(table, static_cast<const decltype(zero)*>(base), found);
        });
    return found;
}

}  // namespace dcr
