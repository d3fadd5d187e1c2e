// The extension's own small thread pool: sleeps on a condition variable after a short spin, so it does not fight torch's threads.
// A kernel splits over outputs or rows only, so results are the same for any number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace halfbyte {

// A non-owning reference to a callable void(begin, end); lives as long as the call it is passed to.
class RangeTask {
   public:
    template <class F, class = std::enable_if_t<!std::is_same_v<std::decay_t<F>, RangeTask>>>
    RangeTask(const F& f)  // NOLINT: implicit on purpose
        : object_(std::addressof(f)), call_([](const void* o, int64_t b, int64_t e) { (*static_cast<const F*>(o))(b, e); }) {}
    void operator()(int64_t begin, int64_t end) const { call_(object_, begin, end); }

   private:
    const void* object_;
    void (*call_)(const void*, int64_t, int64_t);
};

// Runs task(begin, end) over disjoint pieces covering [0, items). Pieces hold at least `grain` items (the last may hold fewer);
// one piece runs on the calling thread without waking anyone. The task must not throw and must not call parallel_for.
void parallel_for(int64_t items, int64_t grain, const RangeTask& task);

int thread_count();
void set_thread_count(int n);

}  // namespace halfbyte
