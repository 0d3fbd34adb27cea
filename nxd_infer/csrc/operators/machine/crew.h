// A crew is a rank's own thread pool: its threads share the work, poll for the next piece, and prefetch the next
// weights meanwhile.
//
// torch's threads (OpenMP) synchronise at the end of every loop: one that the system has preempted keeps all of them
// waiting, even if no work is left; and between two loops, while one thread works alone, memory is idle. In a crew no
// thread waits for one that has not started, and waiting threads prefetch (2 to 6 % less time per token on Zen 4). A
// rank with its own cores engages a crew (nxd_infer/runtime/rank_process/main.py); otherwise torch's threads do the work.
#pragma once

#include <atomic>
#include <cstdint>

namespace nxd {

constexpr int64_t kMostThreads = 64;

// Memory that a thread will read. Other threads may read it during a write: they then prefetch uselessly but
// harmlessly.
class Span {
 public:
  void set(const char* begin, int64_t bytes) {
    begin_.store(begin, std::memory_order_relaxed);
    bytes_.store(bytes, std::memory_order_relaxed);
  }
  const char* begin() const { return begin_.load(std::memory_order_relaxed); }
  int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  std::atomic<const char*> begin_{nullptr};
  std::atomic<int64_t> bytes_{0};
};

// The memory that each thread will read in one piece of work.
struct Spans {
  Span of[kMostThreads];
};

using Work = void (*)(int64_t worker, void* context);

// Calls work(worker, context) on this thread (worker 0) and on those of workers 1 .. workers - 1 that join while it
// runs: it must continue until no work is left, whichever workers join. Returns false, without a call, if there is no
// crew, this thread must not use it, or another thread is using it. An exception of a call is thrown here once all have
// ended.
bool crew_works(int64_t workers, Work work, void* context);

// Whether this thread is inside such work: then it does not share work.
bool in_crew();

// Threads of the crew, including this one; 0 without a crew.
int64_t crew_size();

// The spans of the work that this thread starts now, which reads the memory at `begin`; the caller sets those of all
// crew threads. From here on, waiting threads prefetch the spans of the work that followed this one last time. nullptr
// if they do not: they follow only the thread that engaged the crew.
Spans* begins(const void* begin);

} // namespace nxd
