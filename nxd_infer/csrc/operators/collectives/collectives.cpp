// The collective operators over shared memory. Each sends its tensor in pieces of at most one slot; slots are
// double-buffered, so one barrier per piece is enough. Schemas are those of torch.ops.nxd.*.
#include "collectives/connection.h"
#include "interface/plans.h"
#include "collectives/reduce.h"
#include "interface/registration.h"
#include "interface/tensors.h"
#include "collectives/text.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace nxd {
namespace {

constexpr int64_t kShareWork = 64 * 1024;

std::mutex registry_mutex;
std::map<std::string, std::shared_ptr<Connection>>& registry() {
  static auto* connections = new std::map<std::string, std::shared_ptr<Connection>>;  // outlives every exit handler
  return *connections;
}

Reduction reduction_named(const std::string& op) {
  if (op == "sum") return Reduction::sum;
  if (op == "max") return Reduction::max;
  if (op == "min") return Reduction::min;
  throw std::runtime_error("nxd: operation '" + op + "' is not one of sum, max, min");
}

// One dimension of a contiguous tensor, split over the ranks: rank r's piece has, for each of `outer` rows, the `row`
// bytes from (o * degree + r) * row.
struct Split {
  int64_t row;
  int64_t degree;

  // Calls visit(offset in the whole, offset in the piece, bytes) for bytes [begin, end) of rank r's piece.
  template <typename Visit>
  void each(int64_t r, int64_t begin, int64_t end, Visit visit) const {
    while (begin < end) {
      const int64_t o = begin / row, within = begin % row;
      const int64_t bytes = std::min(row - within, end - begin);
      visit((o * degree + r) * row + within, begin, bytes);
      begin += bytes;
    }
  }
};

int64_t checked_dim(const Tensor& x, int64_t dim, const char* what) {
  const int64_t dims = x.dim();
  if (dim < -dims || dim >= dims) {
    throw std::runtime_error(
        std::string("nxd: ") + what + ": dimension " + std::to_string(dim) + " of a tensor of " +
        std::to_string(dims) + " dimensions");
  }
  return dim < 0 ? dim + dims : dim;
}

int64_t row_bytes(const Tensor& x, const std::vector<int64_t>& shape, int64_t dim) {
  int64_t bytes = static_cast<int64_t>(x.element_size());
  for (size_t i = static_cast<size_t>(dim); i < shape.size(); i++) {
    bytes *= shape[i];
  }
  return bytes;
}

int64_t byte_count(const Tensor& x) { return x.numel() * static_cast<int64_t>(x.element_size()); }

Call describe(Op op, const Tensor& x, int64_t argument) {
  return Call{static_cast<uint32_t>(op), static_cast<uint32_t>(x.dtype()), x.numel(), argument};
}

char* bytes_of(const Tensor& x) { return static_cast<char*>(x.data_ptr()); }

// Exchanges `total` bytes in pieces of at most `most`: put(begin, end) fills this rank's slot, and take(begin, end)
// reads those of all ranks once they have met. Nothing if there are none.
template <typename Put, typename Take>
void exchange(Connection& link, const Call& call, int64_t total, int64_t most, const Put& put, const Take& take) {
  if (total == 0) return;
  const std::lock_guard<std::mutex> guard(link.mutex());
  link.check();
  for (int64_t begin = 0; begin < total; begin += most) {
    const int64_t end = std::min(begin + most, total);
    put(begin, end);
    link.meet(call);
    take(begin, end);
  }
  link.count_collective();
}

Tensor copy_of(const Tensor& x) {
  Tensor y = new_like(x, shape_of(x));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(y.get(), x.get(), 0));
  return y;
}

// The shape of one rank's piece; throws if the dimension does not divide.
std::vector<int64_t> piece_shape(const Tensor& x, int64_t dim, int64_t degree, const char* what) {
  auto shape = shape_of(x);
  if (degree < 1 || shape[dim] % degree != 0) {
    throw std::runtime_error(
        std::string("nxd: ") + what + ": dimension " + std::to_string(dim) + " of size " + std::to_string(shape[dim]) +
        " does not divide by " + std::to_string(degree) + " ranks");
  }
  shape[dim] /= degree;
  return shape;
}

// An all-reduce of `total` bytes that lie together.
struct AllReduce {
  std::string axis;
  int64_t degree;
  Reduction reduction;
  torch::headeronly::ScalarType dtype;
  Call call;
  int64_t width, total;  // bytes of an element, of all

  AllReduce(const Tensor& x, std::string axis, const std::string& op, int64_t degree)
      : axis(std::move(axis)), degree(degree), reduction(reduction_named(op)), dtype(x.scalar_type()),
        call(describe(Op::all_reduce, x, static_cast<int64_t>(reduction))),
        width(static_cast<int64_t>(x.element_size())), total(byte_count(x)) {
    check_reducible(dtype, reduction);
  }

  void run(const char* from, char* to) const {
    auto link = connection(axis, degree);
    const auto put = [&](int64_t begin, int64_t end) { std::memcpy(link->next_slot(), from + begin, end - begin); };
    exchange(*link, call, total, link->capacity(), put, [&](int64_t begin, int64_t end) {
      const int64_t bytes = end - begin;
      const char* sources[kMaxDegree];
      for (int r = 0; r < degree; r++) sources[r] = link->slot(r);
      if (bytes < kShareWork) {
        reduce(dtype, reduction, sources, static_cast<int>(degree), to + begin, bytes / width);
        return;
      }
      // Worth a second barrier: each rank reduces one stretch and copies the other stretches from the other ranks.
      const int64_t stretch = (bytes + 64 * degree - 1) / (64 * degree) * 64;  // rounded up: no byte is left over
      auto first = [&](int64_t r) { return std::min(r * stretch, bytes); };
      const int64_t own = first(link->rank());
      for (int r = 0; r < degree; r++) sources[r] += own;
      const int64_t count = (first(link->rank() + 1) - own) / width;
      reduce(dtype, reduction, sources, static_cast<int>(degree), link->next_slot(), count);
      link->meet(call);
      for (int r = 0; r < degree; r++) {
        std::memcpy(to + begin + first(r), link->slot(r), first(r + 1) - first(r));
      }
    });
  }
};

Tensor all_reduce(Tensor x_in, Text axis, Text op, int64_t degree) {
  const AllReduce work(x_in, axis, op, degree);
  if (degree == 1) return copy_of(x_in);
  const Tensor x = contiguous(x_in);
  Tensor y = new_like(x, shape_of(x));
  work.run(bytes_of(x), bytes_of(y));
  return y;
}

class PlannedAllReduce : public Planned {
 public:
  explicit PlannedAllReduce(AllReduce work) : work_(std::move(work)) {}
  void point(char* const* data) override {
    from_ = data[0];
    to_ = data[1];
  }
  void run() override { work_.run(from_, to_); }

 private:
  const AllReduce work_;
  const char* from_ = nullptr;
  char* to_ = nullptr;
};

std::unique_ptr<Planned> plan_all_reduce(const PlannedArgument* arguments) {
  const Tensor x = tensor_of(arguments[0]);
  const int64_t degree = arguments[3].integer;
  if (degree == 1 || !x.is_contiguous()) return nullptr;
  return std::make_unique<PlannedAllReduce>(AllReduce(x, arguments[1].text, arguments[2].text, degree));
}

Tensor all_gather(Tensor x_in, Text axis, int64_t dim, int64_t degree) {
  dim = checked_dim(x_in, dim, "all_gather");
  if (degree == 1) return copy_of(x_in);
  auto link = connection(axis, degree);
  const Tensor x = contiguous(x_in);
  auto shape = shape_of(x);
  const Split split{row_bytes(x, shape, dim), degree};
  shape[dim] *= degree;
  Tensor y = new_like(x, shape);
  const char* from = bytes_of(x);
  char* to = bytes_of(y);
  const auto put = [&](int64_t begin, int64_t end) { std::memcpy(link->next_slot(), from + begin, end - begin); };
  exchange(
      *link, describe(Op::all_gather, x, dim), byte_count(x), link->capacity(), put, [&](int64_t begin, int64_t end) {
        for (int r = 0; r < degree; r++) {
          const char* slot = link->slot(r);
          split.each(r, begin, end, [&](int64_t whole, int64_t piece, int64_t bytes) {
            std::memcpy(to + whole, slot + (piece - begin), bytes);
          });
        }
      });
  return y;
}

Tensor reduce_scatter(Tensor x_in, Text axis, int64_t dim, int64_t degree) {
  dim = checked_dim(x_in, dim, "reduce_scatter");
  const auto dtype = x_in.scalar_type();
  check_reducible(dtype, Reduction::sum);
  const auto shape = piece_shape(x_in, dim, degree, "reduce_scatter");
  if (degree == 1) return copy_of(x_in);
  auto link = connection(axis, degree);
  const Tensor x = contiguous(x_in);
  Tensor y = new_like(x, shape);
  const auto width = static_cast<int64_t>(x.element_size());
  const Split split{row_bytes(x, shape, dim), degree};
  const char* from = bytes_of(x);
  char* to = bytes_of(y);
  // A slot has the same stretch of every rank's piece, consecutively, each starting at an element boundary.
  const int64_t stretch = link->capacity() / degree / 8 * 8;
  const auto put = [&](int64_t begin, int64_t end) {
    char* slot = link->next_slot();
    for (int64_t r = 0; r < degree; r++) {
      split.each(r, begin, end, [&](int64_t whole, int64_t piece, int64_t bytes) {
        std::memcpy(slot + r * stretch + (piece - begin), from + whole, bytes);
      });
    }
  };
  exchange(
      *link, describe(Op::reduce_scatter, x, dim), byte_count(y), stretch, put, [&](int64_t begin, int64_t end) {
        const char* sources[kMaxDegree];
        for (int r = 0; r < degree; r++) sources[r] = link->slot(r) + link->rank() * stretch;
        reduce(dtype, Reduction::sum, sources, static_cast<int>(degree), to + begin, (end - begin) / width);
      });
  return y;
}

Tensor broadcast(Tensor x_in, Text axis, int64_t src, int64_t degree) {
  if (src < 0 || src >= degree) {
    throw std::runtime_error(
        "nxd: broadcast: source rank " + std::to_string(src) + " is not one of " + std::to_string(degree) + " ranks");
  }
  if (degree == 1) return copy_of(x_in);
  auto link = connection(axis, degree);
  const Tensor x = contiguous(x_in);
  Tensor y = new_like(x, shape_of(x));
  const char* from = bytes_of(x);
  char* to = bytes_of(y);
  const auto put = [&](int64_t begin, int64_t end) {
    if (link->rank() == src) std::memcpy(link->next_slot(), from + begin, end - begin);
  };
  exchange(
      *link, describe(Op::broadcast, x, src), byte_count(x), link->capacity(), put, [&](int64_t begin, int64_t end) {
        std::memcpy(to + begin, link->slot(static_cast<int>(src)), end - begin);
      });
  return y;
}

Tensor shard(Tensor x_in, Text axis, int64_t dim, int64_t degree) {
  dim = checked_dim(x_in, dim, "shard");
  const auto shape = piece_shape(x_in, dim, degree, "shard");
  if (degree == 1) return copy_of(x_in);
  auto link = connection(axis, degree);
  const Tensor x = contiguous(x_in);
  Tensor y = new_like(x, shape);
  if (y.numel() == 0) return y;
  const Split split{row_bytes(x, shape, dim), degree};
  split.each(link->rank(), 0, byte_count(y), [&](int64_t whole, int64_t piece, int64_t bytes) {
    std::memcpy(bytes_of(y) + piece, bytes_of(x) + whole, bytes);
  });
  return y;
}

Tensor axis_rank(Text axis) {
  Tensor y = empty_strided_cpu({}, aoti_torch_dtype_int64());
  *static_cast<int64_t*>(y.data_ptr()) = connection(axis)->rank();
  return y;
}

// The connection of an axis that has another rank of this number.
std::shared_ptr<Connection> connection_to(const std::string& axis, int64_t peer, const char* what) {
  auto link = connection(axis);
  if (peer < 0 || peer >= link->degree() || peer == link->rank()) {
    throw std::runtime_error(
        std::string("nxd: ") + what + ": rank " + std::to_string(peer) + " is not another rank of axis '" + axis + "'");
  }
  link->check();
  return link;
}

void send(Tensor x_in, Text axis, int64_t dst) {
  auto link = connection_to(axis, dst, "send");
  const Tensor x = contiguous(x_in);
  const int64_t total = byte_count(x), most = link->mail_capacity();
  for (int64_t begin = 0; begin < total; begin += most) {
    link->put(static_cast<int>(dst), bytes_of(x) + begin, std::min(most, total - begin));
  }
}

Tensor recv(Tensor like, Text axis, int64_t src) {
  auto link = connection_to(axis, src, "recv");
  Tensor y = new_like(like, shape_of(like));
  const int64_t total = byte_count(y), most = link->mail_capacity();
  for (int64_t begin = 0; begin < total; begin += most) {
    link->take(static_cast<int>(src), bytes_of(y) + begin, std::min(most, total - begin));
  }
  return y;
}

void barrier(Text axis) {
  auto link = connection(axis);
  const std::lock_guard<std::mutex> guard(link->mutex());
  link->check();
  link->meet(Call{static_cast<uint32_t>(Op::barrier), 0, 0, 0});
  link->count_collective();
}

void comm_init(Text axis, int64_t fd, int64_t rank, int64_t degree, int64_t capacity, double timeout) {
  const std::lock_guard<std::mutex> guard(registry_mutex);
  if (registry().count(axis) != 0) {
    throw std::runtime_error("nxd: axis '" + axis + "' is already connected in this process; call comm_close first");
  }
  registry()[axis] = std::make_shared<Connection>(axis, static_cast<int>(fd), rank, degree, capacity, timeout);
}

void comm_close(Text axis) {
  const std::lock_guard<std::mutex> guard(registry_mutex);
  registry().erase(axis);
}

int64_t comm_step(Text axis) { return static_cast<int64_t>(connection(axis)->count_step()); }

} // namespace

std::shared_ptr<Connection> connection(const std::string& axis) {
  const std::lock_guard<std::mutex> guard(registry_mutex);
  auto found = registry().find(axis);
  if (found == registry().end()) {
    throw std::runtime_error("nxd: axis '" + axis + "' is not connected in this process; call comm_init first");
  }
  return found->second;
}

std::shared_ptr<Connection> connection(const std::string& axis, int64_t degree) {
  auto found = connection(axis);
  if (found->degree() != degree) {
    throw std::runtime_error(
        "nxd: axis '" + axis + "' connects " + std::to_string(found->degree()) + " ranks, the call is for " +
        std::to_string(degree));
  }
  return found;
}

} // namespace nxd

NXD_LIBRARY(m) {
  nxd::define_effect(m, "all_reduce(Tensor x, str axis, str op, int degree) -> Tensor");
  nxd::define_effect(m, "all_gather(Tensor x, str axis, int dim, int degree) -> Tensor");
  nxd::define_effect(m, "reduce_scatter(Tensor x, str axis, int dim, int degree) -> Tensor");
  nxd::define_effect(m, "broadcast(Tensor x, str axis, int src, int degree) -> Tensor");
  nxd::define_effect(m, "shard(Tensor x, str axis, int dim, int degree) -> Tensor");
  nxd::define_effect(m, "axis_rank(str axis) -> Tensor");
  nxd::define_effect(m, "send(Tensor x, str axis, int dst) -> ()");
  nxd::define_effect(m, "recv(Tensor like, str axis, int src) -> Tensor");
  m.def("barrier(str axis) -> ()");
  m.def("comm_init(str axis, int fd, int rank, int degree, int capacity, float timeout) -> ()");
  m.def("comm_close(str axis) -> ()");
  m.def("comm_step(str axis) -> int");
}

NXD_IMPL(CPU, m) {
  m.impl("all_reduce", TORCH_BOX(&nxd::all_reduce));
  m.impl("all_gather", TORCH_BOX(&nxd::all_gather));
  m.impl("reduce_scatter", TORCH_BOX(&nxd::reduce_scatter));
  m.impl("broadcast", TORCH_BOX(&nxd::broadcast));
  m.impl("shard", TORCH_BOX(&nxd::shard));
  m.impl("send", TORCH_BOX(&nxd::send));
  m.impl("recv", TORCH_BOX(&nxd::recv));
}

// These have no tensor argument that determines the device.
NXD_IMPL(CompositeExplicitAutograd, m) {
  m.impl("axis_rank", TORCH_BOX(&nxd::axis_rank));
  m.impl("barrier", TORCH_BOX(&nxd::barrier));
  m.impl("comm_init", TORCH_BOX(&nxd::comm_init));
  m.impl("comm_close", TORCH_BOX(&nxd::comm_close));
  m.impl("comm_step", TORCH_BOX(&nxd::comm_step));
}

NXD_PLAN(all_reduce, nxd::plan_all_reduce);
