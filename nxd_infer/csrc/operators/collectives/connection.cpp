#include "collectives/connection.h"

#include "machine/cpu.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <stdexcept>

namespace nxd {
namespace {

int64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// The low half of the counter: futexes are 32 bits wide.
uint32_t* futex_word(Signal& signal) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half of a counter comes first");
  return reinterpret_cast<uint32_t*>(&signal.value);
}

constexpr uint64_t kLeft = ~0ULL;  // instead of the start time of a rank that has disconnected

// State letter and start time of a process from /proc/PID/stat; 'X' if it is gone, '?' if unknown.
char process_state(int64_t pid, uint64_t* start) {
  char path[64], text[1024];
  std::snprintf(path, sizeof path, "/proc/%lld/stat", static_cast<long long>(pid));
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH ? 'X' : '?';
  }
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) {
    return 'X';
  }
  text[n] = 0;
  const char* p = std::strrchr(text, ')');  // the command name can contain any character
  if (p == nullptr || p[1] == 0) {
    return '?';
  }
  char state = p[2];
  p += 2;
  for (int field = 3; field < 22 && p != nullptr; field++) {  // the 22nd field is the start time
    p = std::strchr(p + 1, ' ');
  }
  *start = p != nullptr ? std::strtoull(p + 1, nullptr, 10) : 0;
  return state;
}

} // namespace

const char* name_of(Op op) {
  static const char* const names[] = {
      "?", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "send", "recv"};
  auto i = static_cast<uint32_t>(op);
  return i < sizeof names / sizeof *names ? names[i] : names[0];
}

Connection::Connection(std::string axis, int fd, int64_t rank, int64_t degree, int64_t capacity, double timeout)
    : axis_(std::move(axis)), rank_(static_cast<int>(rank)), degree_(static_cast<int>(degree)), timeout_(timeout) {
  auto refuse = [&](const std::string& why) {
    throw std::runtime_error("nxd: comm_init of axis '" + axis_ + "': " + why);
  };
  if (degree < 1 || degree > kMaxDegree || rank < 0 || rank >= degree) {
    refuse("rank " + std::to_string(rank) + " of " + std::to_string(degree) + " is not possible (at most 64 ranks)");
  }
  if (!(timeout > 0 && timeout < 1e9)) {
    refuse("the timeout must be above 0 s and finite");
  }
  struct stat st {};
  if (fstat(fd, &st) != 0) {
    refuse(std::string("the descriptor cannot be read: ") + std::strerror(errno));
  }
  Header head{};
  constexpr size_t kFixed = offsetof(Header, failed);
  if (pread(fd, static_cast<void*>(&head), kFixed, 0) != static_cast<ssize_t>(kFixed) || head.magic != kMagic) {
    refuse("the descriptor is not a segment made by create_segment()");
  }
  if (head.degree != degree || (capacity > 0 && head.capacity != static_cast<uint64_t>(capacity))) {
    refuse(
        "the segment is for " + std::to_string(head.degree) + " ranks with " + std::to_string(head.capacity) +
        " bytes each");
  }
  Parts parts(head.degree, head.capacity, head.mail_capacity);
  if (head.capacity % 64 || head.capacity < 64u * head.degree || static_cast<size_t>(st.st_size) < parts.total) {
    refuse("the segment is too small or damaged");
  }
  capacity_ = static_cast<int64_t>(head.capacity);
  mail_capacity_ = static_cast<int64_t>(head.mail_capacity);
  void* mapped = mmap(nullptr, parts.total, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) {
    refuse(std::string("mapping failed: ") + std::strerror(errno));
  }
  base_ = static_cast<char*>(mapped);
  bytes_ = parts.total;
  header_ = reinterpret_cast<Header*>(base_);
  blocks_ = reinterpret_cast<RankBlock*>(base_ + parts.blocks);
  mailboxes_ = reinterpret_cast<Mailbox*>(base_ + parts.mail_signals);
  mail_ = base_ + parts.mail;
  slots_ = base_ + parts.slots;
  // With fewer cores than ranks, spinning only prevents the awaited rank from running.
  spins_ = sysconf(_SC_NPROCESSORS_ONLN) >= degree ? 2000 : 0;
  sequence_ = block(rank_).arrived.value.load();
  uint64_t start = 0;
  process_state(getpid(), &start);
  block(rank_).start_ticks.store(start);
  block(rank_).pid.store(getpid());
}

Connection::~Connection() {
  if (base_ != nullptr) {
    if (block(rank_).pid.load() == getpid()) {  // a copy in a forked process does not leave for this one
      block(rank_).start_ticks.store(kLeft);
    }
    munmap(base_, bytes_);
  }
}

void Connection::check() const {
  if (header_->failed.load(std::memory_order_acquire) == 0) {
    return;
  }
  const int64_t begin = now_ns();  // the rank that writes the message may be kept from its core for seconds
  while (header_->failed.load(std::memory_order_acquire) == 1 && now_ns() - begin < 10000000000) {
    const timespec nap{0, 100000};
    nanosleep(&nap, nullptr);
  }
  char text[sizeof header_->message];
  std::memcpy(text, header_->message, sizeof text);
  text[sizeof text - 1] = 0;
  throw std::runtime_error(text[0] ? text : "nxd: the group failed");
}

char* Connection::next_slot() { return slots_ + (((sequence_ + 1) & 1) * degree_ + rank_) * capacity_; }

const char* Connection::slot(int rank) const { return slots_ + ((sequence_ & 1) * degree_ + rank) * capacity_; }

void Connection::meet(const Call& call) {
  const uint64_t target = ++sequence_;
  const auto op = static_cast<Op>(call.op);
  block(rank_).calls[target & 1] = call;
  publish(block(rank_).arrived, target);
  auto missing = [&] {
    uint64_t mask = 0;
    for (int r = 0; r < degree_; r++) {
      if (block(r).arrived.value.load(std::memory_order_acquire) < target) {
        mask |= 1ULL << r;
      }
    }
    return mask;
  };
  for (int r = 0; r < degree_; r++) {
    wait(block(r).arrived, target, op, missing);
  }
  for (int r = 0; r < degree_; r++) {
    const Call& other = block(r).calls[target & 1];
    if (!(other == call)) {
      std::ostringstream text;
      auto say = [&](int who, const Call& what) {
        text << "rank " << who << " is in " << name_of(static_cast<Op>(what.op)) << " of " << what.numel
             << " values (dtype " << what.dtype << ", argument " << what.argument << ")";
      };
      text << "nxd: the ranks of axis '" << axis_ << "' went apart: ";
      say(rank_, call);
      text << ", ";
      say(r, other);
      fail(text.str(), 0);
    }
  }
}

void Connection::put(int to, const void* data, int64_t bytes) {
  Mailbox& box = mailbox(rank_, to);
  const uint64_t before = box.sent.value.load();
  wait(box.received, before, Op::send, [&] { return 1ULL << to; });
  std::memcpy(letter(rank_, to), data, bytes);
  box.bytes = bytes;
  publish(box.sent, before + 1);
}

void Connection::take(int from, void* data, int64_t bytes) {
  Mailbox& box = mailbox(from, rank_);
  const uint64_t next = box.received.value.load() + 1;
  wait(box.sent, next, Op::recv, [&] { return 1ULL << from; });
  if (box.bytes != bytes) {
    fail(
        "nxd: rank " + std::to_string(rank_) + " receives a piece of " + std::to_string(bytes) + " bytes on axis '" +
            axis_ + "', but rank " + std::to_string(from) + " sent one of " + std::to_string(box.bytes) +
            ": both must name one shape and dtype",
        0);
  }
  std::memcpy(data, letter(from, rank_), bytes);
  publish(box.received, next);
}

void Connection::count_collective() {
  RankBlock& mine = block(rank_);
  mine.collectives.store(mine.collectives.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  mine.last_ns.store(now_ns(), std::memory_order_release);
}

uint64_t Connection::count_step() {
  RankBlock& mine = block(rank_);
  const uint64_t steps = mine.steps.load(std::memory_order_relaxed) + 1;
  mine.steps.store(steps, std::memory_order_relaxed);
  mine.last_ns.store(now_ns(), std::memory_order_release);
  return steps;
}

void Connection::publish(Signal& signal, uint64_t value) const {
  signal.value.store(value, std::memory_order_seq_cst);
  if (signal.waiters.load(std::memory_order_seq_cst) != 0) {
    syscall(SYS_futex, futex_word(signal), FUTEX_WAKE, kMaxDegree, nullptr, nullptr, 0);
  }
}

void Connection::wait(Signal& signal, uint64_t target, Op op, const std::function<uint64_t()>& missing) const {
  auto ready = [&] { return signal.value.load(std::memory_order_acquire) >= target; };
  for (int i = 0; i < spins_; i++) {
    if (ready()) {
      return;
    }
    relax();
  }
  if (ready()) {
    return;
  }
  const int64_t begin = now_ns();
  const auto limit = static_cast<int64_t>(timeout_ * 1e9);
  int64_t looked = begin;
  while (!ready()) {
    const int64_t now = now_ns();
    if (now - begin < 200000) {  // a peer that is only slightly late: yield, do not sleep yet
      sched_yield();
      continue;
    }
    check();
    if (now - begin >= limit) {
      if (ready()) {  // the last one came while this rank was kept from its core
        return;
      }
      give_up(op, missing(), "");
    }
    if (now - looked >= 100000000) {  // ten times per second: does the peer still exist?
      looked = now;
      uint64_t gone = 0, left = 0;
      const uint64_t awaited = missing();
      for (int r = 0; r < degree_; r++) {
        const int64_t pid = block(r).pid.load();
        uint64_t start = 0;
        if ((awaited >> r & 1) && block(r).start_ticks.load() == kLeft) {
          left |= 1ULL << r;
        } else if ((awaited >> r & 1) && pid != 0) {
          const char state = process_state(pid, &start);
          if (state == 'X' || state == 'Z' || (state != '?' && start != block(r).start_ticks.load())) {
            gone |= 1ULL << r;
          }
        }
      }
      if (ready()) {  // its last piece arrived just before it ended
        return;
      }
      if ((gone & missing()) != 0) {
        give_up(op, gone & missing(), ": the process has ended");
      }
      if ((left & missing()) != 0) {
        give_up(op, left & missing(), ": it has left the group");
      }
    }
    const int64_t nap = std::min<int64_t>(20000000, begin + limit - now);
    timespec pause{nap / 1000000000, nap % 1000000000};
    signal.waiters.fetch_add(1, std::memory_order_seq_cst);
    const uint64_t seen = signal.value.load(std::memory_order_seq_cst);
    if (seen < target) {
      syscall(SYS_futex, futex_word(signal), FUTEX_WAIT, static_cast<uint32_t>(seen), &pause, nullptr, 0);
    }
    signal.waiters.fetch_sub(1, std::memory_order_seq_cst);
  }
}

void Connection::give_up(Op op, uint64_t missing, const char* why) const {
  std::ostringstream text;
  text.setf(std::ios::fixed);
  text.precision(1);
  const auto number = static_cast<unsigned long long>(block(rank_).collectives.load(std::memory_order_relaxed) + 1);
  text << "nxd: rank(s) " << describe(missing) << " did not reach " << name_of(op) << " (number " << number
       << " on axis '" << axis_ << "', called by rank " << rank_ << ") within " << timeout_ << " s" << why;
  fail(text.str(), missing);
}

void Connection::fail(const std::string& message, uint64_t ranks) const {
  uint32_t none = 0;
  if (header_->failed.compare_exchange_strong(none, 1)) {
    header_->failed_ranks = ranks;
    std::snprintf(header_->message, sizeof header_->message, "%s", message.c_str());
    header_->failed.store(2, std::memory_order_release);
    for (int r = 0; r < degree_; r++) {
      syscall(SYS_futex, futex_word(block(r).arrived), FUTEX_WAKE, kMaxDegree, nullptr, nullptr, 0);
    }
  }
  check();
}

std::string Connection::describe(uint64_t ranks) const {
  std::ostringstream text;
  const char* comma = "[";
  for (int r = 0; r < degree_; r++) {
    if (ranks >> r & 1) {
      text << comma << r;
      comma = ", ";
    }
  }
  text << "]";
  return text.str();
}

} // namespace nxd
