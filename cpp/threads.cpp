#include "threads.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace halfbyte {
namespace {

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// One job at a time: the caller publishes it, workers and caller take pieces from one counter until none is left.
class Pool {
   public:
    void resize(int n) {
        std::lock_guard<std::mutex> call(call_);
        stop();
        wanted_ = std::max(1, n);
    }

    void run(int64_t items, int64_t pieces, const RangeTask& task) {
        std::lock_guard<std::mutex> call(call_);
        start();
        if (workers_.empty()) {
            task(0, items);
            return;
        }
        {
            std::lock_guard<std::mutex> lock(state_);
            task_ = &task;
            items_ = items;
            pieces_ = pieces;
            next_.store(0, std::memory_order_relaxed);
            busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
            round_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        work();
        for (int spin = 0; spin < kSpin; ++spin) {
            if (busy_.load(std::memory_order_acquire) == 0) return;
            pause_cpu();
        }
        std::unique_lock<std::mutex> lock(state_);
        done_.wait(lock, [this] { return busy_.load(std::memory_order_acquire) == 0; });
    }

    int wanted() const { return wanted_.load(std::memory_order_relaxed); }

   private:
    static constexpr int kSpin = 64;  // a few microseconds

    void start() {
        const size_t need = static_cast<size_t>(wanted_.load() - 1);
        if (workers_.size() == need) return;
        stop();
        stopping_ = false;
        const uint64_t round = round_.load();
        for (size_t i = 0; i < need; ++i) workers_.emplace_back([this, round] { loop(round); });
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(state_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (auto& w : workers_) w.join();
        workers_.clear();
    }

    void work() {
        for (;;) {
            const int64_t piece = next_.fetch_add(1, std::memory_order_relaxed);
            if (piece >= pieces_) return;
            const int64_t begin = items_ * piece / pieces_, end = items_ * (piece + 1) / pieces_;
            if (begin < end) (*task_)(begin, end);
        }
    }

    void loop(uint64_t seen) {
        for (;;) {
            for (int spin = 0; spin < kSpin && round_.load(std::memory_order_acquire) == seen; ++spin) pause_cpu();
            {
                std::unique_lock<std::mutex> lock(state_);
                wake_.wait(lock, [&] { return stopping_ || round_.load(std::memory_order_acquire) != seen; });
                if (stopping_) return;
                seen = round_.load(std::memory_order_acquire);
            }
            work();
            if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                std::lock_guard<std::mutex> lock(state_);
                done_.notify_one();
            }
        }
    }

    std::mutex call_;   // one parallel_for at a time
    std::mutex state_;  // guards the job and both conditions
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    std::atomic<int> wanted_{1};
    bool stopping_ = false;
    std::atomic<uint64_t> round_{0};
    std::atomic<int> busy_{0};
    std::atomic<int64_t> next_{0};
    const RangeTask* task_ = nullptr;
    int64_t items_ = 0, pieces_ = 0;
};

// Never destroyed: workers may still sleep when the interpreter exits.
Pool*& pool() {
    static Pool* instance = [] {
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(nullptr, nullptr, [] {
            const int n = pool()->wanted();
            pool() = new Pool();
            pool()->resize(n);
        });
#endif
        return new Pool();
    }();
    return instance;
}

}  // namespace

void parallel_for(int64_t items, int64_t grain, const RangeTask& task) {
    if (items <= 0) return;
    const int threads = pool()->wanted();
    const int64_t most = items / std::max<int64_t>(1, grain);
    if (threads == 1 || most <= 1) {
        task(0, items);
        return;
    }
    // A few pieces a thread, so that a thread that loses its core does not hold up the rest.
    pool()->run(items, std::min<int64_t>(most, threads * 4), task);
}

int thread_count() { return pool()->wanted(); }

void set_thread_count(int n) { pool()->resize(n); }

}  // namespace halfbyte
