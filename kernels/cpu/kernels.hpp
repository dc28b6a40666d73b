// The kernels, over checked tables. dcr/kernels/reference.py defines what each computes; `b` is bytes per element of the
// storage, `c` bytes after the value map (equal to b without one). Bytes moved are what reaches memory at least.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "table.hpp"

namespace dcr {

// out [N], c bytes each: the table's elements, dense.                           Moves N b (read) + N c (written).
void read(const Table& table, int kind, void* out);

// Memory from malloc, which may grow in place and which python can take over.
struct Freed {
    void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Freed>;

// What `compare` found, before K is known: positions, new and old bits, in memory that grows with them.
class Changes {
  public:
    explicit Changes(size_t width) : width_(width) {}

    // Room for `n` more changes and the slack behind them; `added` says how many of them came.
    void reserve(size_t n);
    uint32_t* positions() const { return static_cast<uint32_t*>(positions_.get()) + size_; }
    void* bits() const { return static_cast<char*>(bits_.get()) + size_ * width_; }
    void* old() const { return static_cast<char*>(old_.get()) + size_ * width_; }
    void added(size_t count) { size_ += count; }

    size_t size() const { return size_; }  // K
    // Gives away positions [K], bits [K] and old [K], without the room behind them.
    Memory take_positions() { return cut(positions_, sizeof(uint32_t)); }
    Memory take_bits() { return cut(bits_, width_); }
    Memory take_old() { return cut(old_, width_); }

  private:
    Memory cut(Memory& memory, size_t width) const;

    size_t width_;
    size_t size_ = 0, room_ = 0;  // elements; the slack is not counted
    Memory positions_, bits_, old_;
};

// base [N], c bytes each: what differs from it.                                 Moves N (b + c) + 2 K (4 + 2 c).
Changes compare(const Table& table, const void* base, int kind);

// positions [K], out [K]: the bits there.                     Moves K (4 + b) + one cache line per line touched.
void gather(const Table& table, const uint32_t* positions, size_t K, void* out);

// How a change's values combine with the old bits, modulo 2^(8 b); the numbers are those of dcr/kernels/reference.py.
enum class Operation : int { OVERWRITE = 0, XOR = 1, STEP = 2 };

// positions [K], values [K]: the bits there are old [K], and what the operation makes of them is now [K]; adds the
// digest lanes of either to sums [T, 2].                    Moves K (4 + 3 b) + one cache line per line touched.
void prepare(const Table& table, const uint64_t* keys, const uint32_t* positions, const void* values, size_t K,
             Operation operation, void* old, void* now, uint64_t* old_sums, uint64_t* new_sums);

// positions [K], bits [K]: writes all of them, then reads all of them back; returns how many do not hold their bits.
//                                                      Moves 2 K (4 + b) + two cache lines per line touched.
size_t scatter(const Table& table, const uint32_t* positions, const void* bits, size_t K);

// keys and sums [T, 2]: adds the digest lanes of all elements, after the value map.                  Moves N b.
void digest(const Table& table, const uint64_t* keys, int kind, uint64_t* sums);

// The same over positions [K], as if they held bits [K] of `width` bytes; no storage is read.       Moves K (4 + width).
void digest_at(const Table& table, const uint64_t* keys, const uint32_t* positions, const void* bits, size_t width,
               size_t K, uint64_t* sums);

// Of old and new bits at the same positions.                                        Moves K (4 + 2 width).
void digest_both(const Table& table, const uint64_t* keys, const uint32_t* positions, const void* old, const void* now,
                 size_t width, size_t K, uint64_t* old_sums, uint64_t* new_sums);

// Which of ascending positions lie in some runs: for each run that has any, positions [from, to), and what their
// numbers lose (modulo 2^32) to be counted over the runs alone.
struct Selection {
    struct Part {
        size_t from, to;
        uint32_t shift;
    };
    std::vector<Part> parts;
    size_t size = 0;  // K'
};

// positions [K], checked; runs [R, 2] of (start, count). Throws std::invalid_argument unless runs ascend, do not
// overlap and hold fewer than 2^32 elements.
Selection plan_selection(const uint32_t* positions, size_t K, const int64_t* runs, size_t R);

// indices and local [K']: which positions are kept, and their numbers over the runs one after another.   Moves 12 K'.
void select(const Selection& selection, const uint32_t* positions, uint32_t* indices, uint32_t* local);

// Bytes per element after a value map.
inline size_t width_after(int kind, size_t width) { return kind == 0 ? width : 2; }

}  // namespace dcr
