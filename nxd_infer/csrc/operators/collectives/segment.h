// The shared memory of one group of ranks: a memfd created by the parent, mapped by every rank.
//
//   header | one block per rank | mailbox signals (degree x degree) | mailboxes | slots (2 buffers x degree)
//
// nxd_infer/comm/shm.py writes the header and reads the blocks: its offsets must match these.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace nxd {

constexpr uint64_t kMagic = 0x31304d485344584eULL;  // "NXDSHM01"
constexpr int kMaxDegree = 64;
constexpr size_t kHeaderBytes = 512;
constexpr size_t kPage = 4096;

// A counter that other processes wait for. `waiters` is the number of sleeping ones.
struct Signal {
  std::atomic<uint64_t> value;
  std::atomic<uint32_t> waiters;
  uint32_t unused;
};

// A rank's description of its collective call, so that mismatched calls are detected before data is mixed.
struct Call {
  uint32_t op;
  uint32_t dtype;
  int64_t numel;
  int64_t argument;
  bool operator==(const Call& o) const {
    return op == o.op && dtype == o.dtype && numel == o.numel && argument == o.argument;
  }
};

struct alignas(256) RankBlock {
  Signal arrived;   // the last piece of a collective that this rank has put into its slot
  Call calls[2];    // of even and odd pieces; written before `arrived`
  alignas(128) std::atomic<uint64_t> collectives;  // finished calls
  std::atomic<uint64_t> steps;                     // steps reported by the rank itself
  std::atomic<int64_t> last_ns;                    // CLOCK_MONOTONIC of the last of either
  std::atomic<int64_t> pid;
  std::atomic<uint64_t> start_ticks;               // of that process, in clock ticks since boot
};

struct Header {
  uint64_t magic;
  uint32_t degree;
  uint32_t unused;
  uint64_t capacity;       // bytes of one slot
  uint64_t mail_capacity;  // bytes of one mailbox
  alignas(64) std::atomic<uint32_t> failed;  // 0 no, 1 being written, 2 yes
  uint32_t unused2;
  uint64_t failed_ranks;   // bit r: rank r
  char message[432];
};

struct alignas(128) Mailbox {
  Signal sent;
  int64_t bytes;  // of the letter; written before `sent`
  alignas(64) Signal received;
};

static_assert(sizeof(Header) == kHeaderBytes, "the header is 512 bytes");
static_assert(offsetof(Header, failed) == 64 && offsetof(Header, failed_ranks) == 72);
static_assert(offsetof(Header, message) == 80);
static_assert(sizeof(RankBlock) == 256 && offsetof(RankBlock, collectives) == 128 && offsetof(RankBlock, pid) == 152);
static_assert(sizeof(Mailbox) == 128);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

inline size_t page_up(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// The offsets of the parts, computed from the degree and the capacities.
struct Parts {
  size_t blocks, mail_signals, mail, slots, total;
  Parts(size_t degree, size_t capacity, size_t mail_capacity) {
    blocks = kHeaderBytes;
    mail_signals = page_up(blocks + degree * sizeof(RankBlock));
    mail = page_up(mail_signals + degree * degree * sizeof(Mailbox));
    slots = page_up(mail + degree * degree * mail_capacity);
    total = slots + 2 * degree * capacity;
  }
};

} // namespace nxd
