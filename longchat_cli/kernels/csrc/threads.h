// A small pool: the caller is thread 0, the others spin briefly between calls, then yield, then sleep.
#pragma once

#include <atomic>
#include <cstdint>

namespace longchat {

constexpr int kMaxThreads = 64;

// What the threads of one call share: a barrier, and counters from which they take work.
class Team {
 public:
  explicit Team(int size) : size_(size) {}
  int size() const { return size_; }

  // All threads meet here; what was written before is seen after, and all stages begin anew.
  void barrier();

  // The next `step` items of a stage's `count`: [begin, end); false when none are left. Stages are numbered
  // from 0 to 7 between barriers.
  bool take(int stage, int64_t count, int64_t step, int64_t* begin, int64_t* end) {
    const int64_t at = taken_[stage].fetch_add(step, std::memory_order_relaxed);
    if (at >= count) return false;
    *begin = at;
    *end = at + step < count ? at + step : count;
    return true;
  }

 private:
  void begin() {
    for (auto& taken : taken_) taken.store(0, std::memory_order_relaxed);
  }

  int size_;
  std::atomic<int> arrived_{0};
  std::atomic<uint32_t> round_{0};
  std::atomic<int64_t> taken_[8] = {};
};

// Where a thread's time goes, for whoever asks: nanoseconds of each phase.
enum class Phase { inputs, products, rotation, attention, waiting, last };

class Watch {
 public:
  // Time from here on goes to `spent`, a number a phase; null: to nobody.
  void start(int64_t* spent);
  // What passed since the last call was spent on a phase.
  void lap(Phase phase) {
    if (spent_) add(phase);
  }

 private:
  void add(Phase phase);
  int64_t* spent_ = nullptr;
  int64_t last_ = 0;
};

extern constinit thread_local Watch watch;

using Work = void (*)(void* context, Team& team, int thread);

// Run `work` on `threads` threads and return when all are done. One call at a time.
void run(int threads, Work work, void* context);

template <typename F>
void parallel(int threads, F&& body) {
  run(threads, [](void* context, Team& team, int thread) { (*static_cast<F*>(context))(team, thread); }, &body);
}

}  // namespace longchat
