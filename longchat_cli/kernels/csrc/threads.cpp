#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define LONGCHAT_PAUSE() _mm_pause()
#else
#define LONGCHAT_PAUSE() std::this_thread::yield()
#endif

namespace longchat {
namespace {

// Long enough for the interpreter's share of a decode step, short enough to leave the core to others.
constexpr int kSpins = 2000;
constexpr int kYields = 200;

struct Call {
  Work work;
  void* context;
  Team* team;
};

struct Pool {
  std::mutex one_call;
  std::atomic<uint32_t> epoch{0};
  std::atomic<int> running{0};
  Call call{};
  int workers = 0;
};

Pool* pool = new Pool;

template <typename Done>
void wait_until(Done done) {
  for (int i = 0; i < kSpins; ++i) {
    if (done()) return;
    LONGCHAT_PAUSE();
  }
  while (!done()) sched_yield();
}

void work_loop(Pool* mine, int thread, uint32_t seen) {
  for (;;) {
    auto called = [&] { return mine->epoch.load(std::memory_order_acquire) != seen; };
    for (int i = 0; i < kSpins && !called(); ++i) LONGCHAT_PAUSE();
    for (int i = 0; i < kYields && !called(); ++i) sched_yield();
    while (!called()) mine->epoch.wait(seen, std::memory_order_acquire);
    seen = mine->epoch.load(std::memory_order_acquire);
    const Call call = mine->call;
    if (thread < call.team->size()) call.work(call.context, *call.team, thread);
    mine->running.fetch_sub(1, std::memory_order_release);
  }
}

// As many workers as there are up to `wanted`, started if need be; fewer where the system gives no more threads.
int hire(int wanted) {
  while (pool->workers < wanted) {
    try {
      // A new worker waits for the next call: the last one's epoch it has seen.
      std::thread(work_loop, pool, pool->workers + 1, pool->epoch.load()).detach();
    } catch (const std::system_error&) {
      return pool->workers;
    }
    ++pool->workers;
  }
  return wanted;
}

int64_t now() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A forked child has none of its parent's threads: it begins with a new pool.
const int forked = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

}  // namespace

constinit thread_local Watch watch;

void Watch::start(int64_t* spent) {
  spent_ = spent;
  last_ = spent ? now() : 0;
}

void Watch::add(Phase phase) {
  const int64_t at = now();
  spent_[static_cast<int>(phase)] += at - last_;
  last_ = at;
}

void Team::barrier() {
  if (size_ == 1) return begin();
  const uint32_t round = round_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    begin();
    round_.store(round + 1, std::memory_order_release);
    round_.notify_all();
    return;
  }
  // Whoever spins on while others want the processor has none left when it is its turn.
  auto met = [&] { return round_.load(std::memory_order_acquire) != round; };
  for (int i = 0; i < kSpins && !met(); ++i) LONGCHAT_PAUSE();
  while (!met()) round_.wait(round, std::memory_order_acquire);
}

void run(int threads, Work work, void* context) {
  if (threads <= 1) {
    Team alone(1);
    work(context, alone, 0);
    return;
  }
  std::lock_guard<std::mutex> lock(pool->one_call);
  Team team(1 + hire((threads > kMaxThreads ? kMaxThreads : threads) - 1));
  pool->call = {work, context, &team};
  pool->running.store(pool->workers, std::memory_order_relaxed);
  pool->epoch.fetch_add(1, std::memory_order_release);
  pool->epoch.notify_all();
  work(context, team, 0);
  wait_until([&] { return pool->running.load(std::memory_order_acquire) == 0; });
}

}  // namespace longchat
