// Work sharing by the rank's crew (crew.h), or by torch's threads: as many as torch.set_num_threads says.
#pragma once

#include "machine/crew.h"

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

namespace nxd {

// Calls body(worker) on this thread and on crew threads that join; see crew_works.
template <typename Body>
bool with_crew(int64_t workers, const Body& body) {
  const Work call = [](int64_t worker, void* context) { (*static_cast<const Body*>(context))(worker); };
  return crew_works(workers, call, const_cast<Body*>(&body));
}

// Calls body(begin, end) on pieces of [begin, end), on as many threads as pay off; in the caller for at most `grain`
// items.
template <typename Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  if (end <= begin) {
    return;
  }
  if (end - begin <= grain || in_crew()) {
    body(begin, end);
    return;
  }
  const int64_t pieces = std::min((end - begin + grain - 1) / grain, crew_size());
  std::atomic<int64_t> next{0};
  const auto take = [&](int64_t) {
    for (int64_t piece = next++; piece < pieces; piece = next++) {
      body(begin + (end - begin) * piece / pieces, begin + (end - begin) * (piece + 1) / pieces);
    }
  };
  if (pieces > 1 && with_crew(pieces, take)) return;
  auto call = [](int64_t from, int64_t to, void* context) { (*static_cast<const Body*>(context))(from, to); };
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, call, const_cast<Body*>(&body)));
}

// Calls body(worker) for workers of [0, workers), each on its own thread if there are enough. It must continue until no
// work is left: with a crew, not every worker joins.
template <typename Body>
void work_together(int64_t workers, const Body& body) {
  if (workers > 1 && with_crew(workers, body)) return;
  parallel_for(0, workers, 1, [&](int64_t worker, int64_t behind) {
    for (; worker < behind; worker++) body(worker);
  });
}

inline int64_t thread_count() {
  if (const int64_t crew = crew_size(); crew > 0) return crew;
  uint32_t threads = 1;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return threads;
}

// Work stealing over items of [0, items): each worker takes pieces of its own range from the front, so that it reads
// one stream, and then steals single items from the back of the others' ranges, so that none waits long for a slower
// one.
class Stretches {
 public:
  Stretches(int64_t items, int64_t workers) : workers_(workers), left_(new Stretch[workers]) {
    for (int64_t w = 0; w < workers; w++) left_[w].span = pair(items * w / workers, items * (w + 1) / workers);
  }

  // Calls body(begin, end) on pieces until none is left, also of other workers' ranges, whether they join or not.
  template <typename Body>
  void work(int64_t worker, const Body& body) {
    int64_t begin, end;
    while (take(worker, true, &begin, &end)) body(begin, end);
    for (int64_t other = worker + 1; other < worker + workers_; other++) {
      while (take(other % workers_, false, &begin, &end)) body(begin, end);
    }
  }

 private:
  struct alignas(64) Stretch {
    std::atomic<uint64_t> span;  // the first item, and the end
  };
  static uint64_t pair(uint64_t begin, uint64_t end) { return begin << 32 | end; }

  // A quarter of what is left from the front, or the last item.
  bool take(int64_t from, bool front, int64_t* begin, int64_t* end) {
    std::atomic<uint64_t>& span = left_[from].span;
    uint64_t found = span.load(std::memory_order_relaxed);
    for (;;) {
      const auto first = static_cast<int64_t>(found >> 32), last = static_cast<int64_t>(found & 0xffffffff);
      if (first >= last) return false;
      const int64_t count = front ? (last - first + 3) / 4 : 1;
      *begin = front ? first : last - 1;
      *end = *begin + count;
      const uint64_t rest = front ? pair(*end, last) : pair(first, *begin);
      if (span.compare_exchange_weak(found, rest, std::memory_order_relaxed)) return true;
    }
  }

  int64_t workers_;
  std::unique_ptr<Stretch[]> left_;
};

} // namespace nxd
