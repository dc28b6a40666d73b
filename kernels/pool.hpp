// Memory for large results, kept for the next ones: chunk after chunk needs arrays of about the same sizes, and pages that
// the system has to hand out anew, and clear, can cost more than what a kernel does with them.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>

namespace dcr {

class Pool {
  public:
    static constexpr size_t LARGE = 64 << 10;  // bytes; anything smaller is malloc's business

    // One for the process; never destroyed, because arrays may outlive everything else.
    static Pool& shared() {
        static Pool* pool = new Pool;
        return *pool;
    }

    // At least so many bytes, not initialised, at most an eighth more; they go back by `give`.
    void* take(size_t bytes) {
        {
            const std::lock_guard lock(mutex_);
            const auto found = kept_.lower_bound(bytes);
            if (found != kept_.end() && found->first <= bytes + bytes / 8) {
                void* memory = found->second;
                held_ -= found->first;
                kept_.erase(found);
                return memory;
            }
        }
        void* block = std::malloc(HEADER + bytes);
        if (!block) throw std::bad_alloc();
        *static_cast<size_t*>(block) = bytes;
        return static_cast<char*>(block) + HEADER;
    }

    void give(void* memory) noexcept {
        void* block = static_cast<char*>(memory) - HEADER;
        const size_t bytes = *static_cast<size_t*>(block);
        try {
            const std::lock_guard lock(mutex_);
            if (held_ + bytes <= MOST) {
                kept_.emplace_hint(kept_.lower_bound(bytes), bytes, memory);  // of equal sizes the last one goes first
                held_ += bytes;
                return;
            }
        } catch (...) {  // no memory to remember it by
        }
        std::free(block);
    }

  private:
    static constexpr size_t MOST = 16 << 20;  // bytes that are kept
    static constexpr size_t HEADER = 64;      // holds the size; whole, so that what is behind it stays aligned

    std::mutex mutex_;
    std::multimap<size_t, void*> kept_;  // by size
    size_t held_ = 0;
};

}  // namespace dcr
