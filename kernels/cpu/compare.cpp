#include <algorithm>
#include <new>
#include <utility>

#include "kernels.hpp"
#include "level.hpp"
#include "pieces.hpp"

namespace dcr {
namespace {

// Room for changes grows to twice what it was, and to this at least. What is not written to costs nothing.
constexpr size_t LEAST_ROOM = 16 * PIECE;

// A null `memory` may be asked to grow, too.
void grow(Memory& memory, size_t bytes) {
    void* grown = std::realloc(memory.get(), bytes);
    if (!grown) throw std::bad_alloc();
    static_cast<void>(memory.release());
    memory.reset(grown);
}

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
    if (positions_ && size_ + n <= room_) return;
    const size_t room = std::max({LEAST_ROOM, 2 * room_, size_ + n});
    grow(positions_, (room + SLACK) * sizeof(uint32_t));
    grow(bits_, (room + SLACK) * width_);
    grow(old_, (room + SLACK) * width_);
    room_ = room;
}

Memory Changes::cut(Memory& memory, size_t width) const {
    grow(memory, std::max<size_t>(size_ * width, 1));
    return std::move(memory);
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
