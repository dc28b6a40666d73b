// Memory for large results, kept for the next ones: chunk after chunk needs arrays of about the same sizes, and pages that
// the system has to hand out anew, and clear, can cost more than what a kernel does with them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

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
            for (size_t i = kept_.size(); i-- > 0;) {  // what was given last is most likely in cache
                const Kept found = kept_[i];
                if (found.bytes < bytes || found.bytes > bytes + bytes / 8) continue;
                kept_.erase(kept_.begin() + std::ptrdiff_t(i));
                held_ -= found.bytes;
                return found.memory;
            }
        }
        void* block = allocate(HEADER + bytes);
        *static_cast<size_t*>(block) = bytes;
        return static_cast<char*>(block) + HEADER;
    }

    // Where more is kept than may be, what has lain longest is freed.
    void give(void* memory) noexcept {
        const Kept given{*static_cast<size_t*>(block_of(memory)), memory};
        const std::lock_guard lock(mutex_);
        if (given.bytes > MOST) return release(given);
        size_t old = 0;
        for (held_ += given.bytes; held_ > MOST; held_ -= kept_[old++].bytes) release(kept_[old]);
        kept_.erase(kept_.begin(), kept_.begin() + std::ptrdiff_t(old));
        kept_.push_back(given);
    }

  private:
    struct Kept {
        size_t bytes;
        void* memory;
    };
    static constexpr size_t MOST = 64 << 20;  // bytes that are kept
    static constexpr size_t MAPPED = 1 << 20;  // bytes from which a block is mapped
    static constexpr size_t HEADER = 64;      // holds the size; whole, so that what is behind it stays aligned

    // Straight from the system where it is large: what a thread's own heap gets back stays with the process.
    static void* allocate(size_t bytes) {
        if (bytes < MAPPED) {
            if (void* block = std::malloc(bytes)) return block;
            throw std::bad_alloc();
        }
        void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (block == MAP_FAILED) throw std::bad_alloc();
        return block;
    }
    static void release(const Kept& kept) noexcept {
        if (HEADER + kept.bytes < MAPPED)
            std::free(block_of(kept.memory));
        else
            munmap(block_of(kept.memory), HEADER + kept.bytes);
    }
    Pool() { kept_.reserve(MOST / LARGE); }  // so `give` never allocates
    static void* block_of(void* memory) { return static_cast<char*>(memory) - HEADER; }

    std::mutex mutex_;
    std::vector<Kept> kept_;  // in the order in which they were given
    size_t held_ = 0;
};

}  // namespace dcr
