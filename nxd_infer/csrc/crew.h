// The threads of a rank: they share its work, wait awake for the next piece, and meanwhile fetch the weights that come.
//
// torch's own threads (OpenMP) meet at the end of every loop: one that the system has given to somebody else keeps all
// of them waiting, though nothing is left to do; and between two loops, while one thread works alone, memory rests. Here
// nobody waits for a thread that has not begun, and those that wait read ahead (2 to 6 % less time a token on Zen 4).
// A rank that has its cores to itself engages a crew (nxd_infer/runtime/rank/main.py); everywhere else torch's threads work.
#pragma once

#include <atomic>
#include <cstdint>

namespace nxd {

constexpr int64_t kMostThreads = 64;

// Memory that a thread will read. Written while others look: what they fetch then is of no use, and does no harm.
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

// What each thread will read in one piece of work.
struct Spans {
  Span of[kMostThreads];
};

using Work = void (*)(int64_t worker, void* context);

// Calls work(worker, context) on this thread (worker 0) and on those of workers 1 .. workers - 1 that come while it runs:
// it has to go on until nothing is left to do, whoever else is there. False, and no call, where there is no crew, this
// thread is to do without, or another one is using it. What one of the calls throws is thrown here once all have ended.
bool crew_works(int64_t workers, Work work, void* context);

// Whether this thread is inside of such work: it shares nothing then.
bool in_crew();

// While it lives, and `rows` are more than those of a step of decoding, this thread's work goes to torch's threads: they
// do the loops of a compiled graph between the operators, and would have to be woken for each.
class ManyRows {
 public:
  explicit ManyRows(int64_t rows);
  ManyRows(const ManyRows&) = delete;
  ~ManyRows();

 private:
  const bool before_;
};

// Threads of the crew, this one included; 0 without one, or where this thread is to do without.
int64_t crew_size();

// The spans of the work that this thread begins now, which reads the memory at `begin`; the caller sets those of all
// threads of the crew. From here on, threads that wait fetch the spans of what came behind this work the last time.
// nullptr where nobody does: they follow the one thread that has engaged the crew, and no work of many rows.
Spans* begins(const void* begin);

} // namespace nxd
