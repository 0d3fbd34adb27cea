// One rank's end of an axis: the mapped segment, the rank's place in it, and waits with a timeout.
#pragma once

#include "collectives/segment.h"

#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace nxd {

enum class Op : uint32_t { all_reduce = 1, all_gather, reduce_scatter, broadcast, barrier, send, recv };
const char* name_of(Op op);

class Connection {
 public:
  Connection(std::string axis, int fd, int64_t rank, int64_t degree, int64_t capacity, double timeout);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int rank() const { return rank_; }
  int degree() const { return degree_; }
  int64_t capacity() const { return capacity_; }
  int64_t mail_capacity() const { return mail_capacity_; }
  // Collectives of one axis run one at a time in a process.
  std::mutex& mutex() { return mutex_; }

  // Throws the group's remembered failure, if any. Call it first in every operation.
  void check() const;

  // This rank's slot for the next piece. It is free: every rank that passed the last meet() has read the piece before.
  char* next_slot();
  // Announces the piece in next_slot() and waits until every rank has announced the same call.
  void meet(const Call& call);
  // The slot of a rank for the piece that meet() completed.
  const char* slot(int rank) const;

  // Point to point: puts or takes one piece of up to mail_capacity() bytes. One thread at a time per peer and
  // direction.
  void put(int to, const void* data, int64_t bytes);
  void take(int from, void* data, int64_t bytes);

  void count_collective();
  uint64_t count_step();

 private:
  RankBlock& block(int rank) const { return blocks_[rank]; }
  Mailbox& mailbox(int from, int to) const { return mailboxes_[from * degree_ + to]; }
  char* letter(int from, int to) const { return mail_ + (from * degree_ + to) * mail_capacity_; }
  void publish(Signal& signal, uint64_t value) const;
  // Waits until signal.value >= target. `missing` returns the ranks still awaited, for the error.
  void wait(Signal& signal, uint64_t target, Op op, const std::function<uint64_t()>& missing) const;
  void give_up(Op op, uint64_t missing, const char* why) const;
  void fail(const std::string& message, uint64_t ranks) const;
  std::string describe(uint64_t ranks) const;

  std::string axis_;
  int rank_, degree_;
  int64_t capacity_, mail_capacity_;
  double timeout_;
  int spins_;
  char* base_ = nullptr;
  size_t bytes_ = 0;
  Header* header_ = nullptr;
  RankBlock* blocks_ = nullptr;
  Mailbox* mailboxes_ = nullptr;
  char* mail_ = nullptr;
  char* slots_ = nullptr;
  uint64_t sequence_ = 0;
  std::mutex mutex_;
};

// The connection of an axis in this process; throws if there is none or its degree differs.
std::shared_ptr<Connection> connection(const std::string& axis);
std::shared_ptr<Connection> connection(const std::string& axis, int64_t degree);

} // namespace nxd
