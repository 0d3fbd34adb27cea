#include "machine/crew.h"

#include "machine/cpu.h"

#ifdef __linux__
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#endif
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <fstream>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace nxd {
namespace {

constexpr int64_t kLeast = 512 << 10;   // bytes that a thread may prefetch: half of L2
constexpr int64_t kMost = 8 << 20;      // the best of 2, 4, 8, 16 and 32 MiB per thread, with two threads
constexpr int64_t kGulp = 512;          // bytes between two polls for work
constexpr int64_t kAwake = 1 << 18;     // polls without work until a thread sleeps: a few milliseconds
constexpr int64_t kPatience = 1 << 10;  // polls until a thread yields its core: about 20 microseconds
constexpr size_t kRemembered = 4096;    // pieces of work whose successors are remembered

// A piece of work, identified by the first memory that it reads.
struct Piece {
  const void* begin = nullptr;
  Spans spans;
  std::atomic<Piece*> next{nullptr};  // what followed it last time
};

// What one thread prefetches while it waits: its part of the upcoming work, one piece after another.
class Ahead {
 public:
  // `begun` counts the started pieces: until another one starts, prefetched data is not prefetched again.
  void follow(const Piece* work, uint64_t begun, int64_t worker, int64_t most) {
    if (begun == begun_) return;
    begun_ = begun;
    work_ = work;
    worker_ = worker;
    done_ = 0;
    left_ = most;
  }

  // False if nothing is left. Prefetching freed memory is harmless: it is not an access.
  bool fetch() {
    if (work_ == nullptr || left_ <= 0) return false;
    const Span& span = work_->spans.of[worker_];
    if (done_ < span.bytes()) {
      const char* from = span.begin() + done_;
      for (int64_t line = 0; line < kGulp; line += 64) __builtin_prefetch(from + line, 0, 2);
      done_ += kGulp;
    } else {
      work_ = work_->next.load(std::memory_order_acquire);
      done_ = 0;
    }
    left_ -= kGulp;  // here too: guarantees an end if no piece has anything to read
    return true;
  }

 private:
  const Piece* work_ = nullptr;
  uint64_t begun_ = 0;
  int64_t worker_ = 0, done_ = 0, left_ = 0;
};

// What each of a crew's `size` threads may prefetch: together half of the outer cache, which other ranks' threads
// share.
int64_t most_ahead(int64_t size) {
  std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");  // "32768K"
  int64_t kibibytes = 0;
  file >> kibibytes;
  return std::clamp((kibibytes << 10) / 2 / size, kLeast, kMost);
}

thread_local bool inside = false;

// One word, so that joining is atomic: the number of a piece of work, whether it can be joined, its workers, and how
// many have joined.
struct State {
  uint64_t word;
  static constexpr uint64_t kOpen = 1ull << 31;
  static State of(uint64_t number, int64_t workers) { return {number << 32 | kOpen | static_cast<uint64_t>(workers) << 16}; }
  uint64_t number() const { return word >> 32; }
  bool open() const { return word & kOpen; }
  int64_t workers() const { return static_cast<int64_t>(word >> 16 & 0x7fff); }
  int64_t joined() const { return static_cast<int64_t>(word & 0xffff); }
};

class Crew {
 public:
  // cores[worker] is the core that a thread is pinned to; nullptr if threads are not pinned.
  Crew(int64_t size, const int32_t* cores) : owner_(getpid()), most_(most_ahead(size)) {
    try {
      for (int64_t worker = 1; worker < size; worker++) {
        const int32_t core = cores == nullptr ? -1 : cores[worker];
        threads_.emplace_back([this, worker, core] {
          if (keep_to(core)) attend(worker);
        });
      }
    } catch (const std::system_error&) {
      // The system has no more threads: work does not depend on them.
    }
    size_ = static_cast<int64_t>(threads_.size()) + 1;
  }

  ~Crew() {
    ended_.store(true);
    wake();
    for (std::thread& thread : threads_) thread.join();
  }

  int64_t size() const { return size_; }
  int64_t joins() const { return joins_; }

  // Whether its threads belong to this process, not to one that forked it.
  bool present() const { return owner_ == getpid(); }

  bool share(int64_t workers, Work work, void* context) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    work_ = work;
    context_ = context;
    next_ = leads() ? following_ : nullptr;
    next_begun_ = leads() ? begun_ : 0;
    done_.store(0, std::memory_order_relaxed);
    number_ = (number_ + 1) & 0xffffffff;
    state_.store(State::of(number_, std::min(workers, size_)).word, std::memory_order_seq_cst);
    wake();
    call(0);
    const State closed{state_.fetch_and(~State::kOpen, std::memory_order_acq_rel)};
    for (int64_t looks = 0; done_.load(std::memory_order_acquire) < closed.joined(); looks++) {
      if (!leads() || !ahead_.fetch()) relax();
      if (impatient(looks)) give_way();  // a thread that joined is waiting for a core
    }
    joins_ += closed.joined();
    const std::exception_ptr failure = std::exchange(failure_, nullptr);
    busy_.store(false, std::memory_order_release);
    if (failure) std::rethrow_exception(failure);
    return true;
  }

  // See crew.h.
  Spans* begins(const void* begin) {
    if (!leads()) return nullptr;
    Piece* piece = last_ == nullptr ? nullptr : last_->next.load(std::memory_order_relaxed);
    if (piece == nullptr || piece->begin != begin) {
      piece = &known(begin);
      if (last_ != nullptr) last_->next.store(piece, std::memory_order_release);
    }
    last_ = piece;
    following_ = piece->next.load(std::memory_order_relaxed);
    ahead_.follow(following_, ++begun_, 0, most_);
    return &piece->spans;
  }

 private:
  bool leads() const { return std::this_thread::get_id() == lead_; }

  // The piece that reads the memory at `begin`. Pieces are never freed, because other threads may read them; those of
  // weights replaced long ago are reused.
  Piece& known(const void* begin) {
    Piece*& place = places_[begin];
    if (place != nullptr) return *place;
    if (pieces_.size() < kRemembered) {
      place = &pieces_.emplace_back();
    } else {
      if (&pieces_[replaced_ % kRemembered] == last_) replaced_++;  // it would follow itself
      place = &pieces_[replaced_++ % kRemembered];
      places_.erase(place->begin);
      place->next.store(nullptr, std::memory_order_relaxed);
    }
    place->begin = begin;
    return *place;
  }

  // --- on any thread, while a piece of work is joined ---

  void call(int64_t worker) {
    inside = true;
    try {
      work_(worker, context_);
    } catch (...) {
      const std::lock_guard<std::mutex> guard(failing_);
      failure_ = std::current_exception();
    }
    inside = false;
  }

  // --- on the crew's own threads ---

  void attend(int64_t worker) {
    Ahead ahead;
    uint64_t last = 0;
    int64_t looks = 0;
    while (!ended_.load(std::memory_order_relaxed)) {
      const State found{state_.load(std::memory_order_acquire)};
      if (found.number() != last && found.open() && worker < found.workers()) {
        last = found.number();
        if (!join(found)) continue;
        call(worker);
        ahead.follow(next_, next_begun_, worker, most_);
        done_.fetch_add(1, std::memory_order_release);
        looks = 0;
      } else if (!ahead.fetch()) {  // does not yield meanwhile: at most half a millisecond, and 2 % of a token's time
        relax();
        if (impatient(++looks)) give_way();  // torch's threads may have a loop to run
        if (looks > kAwake) {
          sleep(last);
          looks = 0;
        }
      }
    }
  }

  static bool impatient(int64_t looks) { return looks > kPatience && looks % 64 == 0; }

  bool join(State found) {
    const uint64_t number = found.number();
    while (found.open() && found.number() == number) {
      if (state_.compare_exchange_weak(found.word, found.word + 1, std::memory_order_acq_rel)) return true;
    }
    return false;
  }

#ifdef __linux__
  // False if it cannot be pinned: elsewhere it might take the core of a needed thread.
  static bool keep_to(int32_t core) {
    if (core < 0) return true;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    return sched_setaffinity(0, sizeof set, &set) == 0;
  }

  static void give_way() { sched_yield(); }

  // A thread that posts work checks for sleepers afterwards, and a thread that goes to sleep checks for work
  // afterwards.
  void sleep(uint64_t last) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t bell = bell_.load(std::memory_order_seq_cst);
    const State found{state_.load(std::memory_order_seq_cst)};
    if ((!found.open() || found.number() == last) && !ended_.load()) {
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell_), FUTEX_WAIT_PRIVATE, bell, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  void wake() {
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    bell_.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell_), FUTEX_WAKE_PRIVATE, kMostThreads, nullptr, nullptr, 0);
  }
#else
  static bool keep_to(int32_t) { return true; }
  static void give_way() { std::this_thread::yield(); }
  void sleep(uint64_t) { std::this_thread::yield(); }
  void wake() {}
#endif

  const pid_t owner_;
  const std::thread::id lead_ = std::this_thread::get_id();
  const int64_t most_;
  int64_t size_ = 1;
  int64_t joins_ = 0;
  alignas(64) std::atomic<uint64_t> state_{0};
  // Written before `state_` opens, read by threads that have joined.
  Work work_ = nullptr;
  void* context_ = nullptr;
  const Piece* next_ = nullptr;
  uint64_t next_begun_ = 0;
  alignas(64) std::atomic<int64_t> done_{0};  // among those that have joined
  alignas(64) std::atomic<bool> ended_{false};
  std::atomic<uint32_t> bell_{0};
  std::atomic<int32_t> sleepers_{0};
  std::atomic<bool> busy_{false};
  uint64_t number_ = 0;
  std::mutex failing_;
  std::exception_ptr failure_;
  // Owned by the leading thread; the others read pieces, and end before them.
  std::deque<Piece> pieces_;
  std::unordered_map<const void*, Piece*> places_;
  size_t replaced_ = 0;
  Piece* last_ = nullptr;             // the work started last
  const Piece* following_ = nullptr;  // what followed it
  uint64_t begun_ = 0;                // pieces
  Ahead ahead_;
  std::vector<std::thread> threads_;
};

Crew* crew = nullptr;

} // namespace

bool crew_works(int64_t workers, Work work, void* context) {
  return crew != nullptr && !inside && crew->share(workers, work, context);
}

bool in_crew() { return inside; }

int64_t crew_size() { return crew == nullptr ? 0 : crew->size(); }

Spans* begins(const void* begin) { return crew_size() == 0 ? nullptr : crew->begins(begin); }

} // namespace nxd

// Makes this process's operators share work among `threads` threads, including the calling one, instead of torch's: for
// a process that only runs graphs. `cores` gives one per thread, or is null. With 1, or more than kMostThreads, there
// is no crew. Must not be called while operators run.
extern "C" __attribute__((visibility("default"))) void nxd_engage_crew(int64_t threads, const int32_t* cores) {
  nxd::Crew* before = std::exchange(nxd::crew, nullptr);
  if (before != nullptr && before->present()) delete before;
  if (threads > 1 && threads <= nxd::kMostThreads) nxd::crew = new nxd::Crew(threads, cores);
}

// How often another thread has joined a piece of work.
extern "C" __attribute__((visibility("default"))) int64_t nxd_crew_joins() {
  return nxd::crew == nullptr ? 0 : nxd::crew->joins();
}
