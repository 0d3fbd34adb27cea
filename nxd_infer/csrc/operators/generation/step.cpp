// The bookkeeping of a generation step: what each row is fed, and what it leaves for the next step. Schemas and
// meanings are those of torch.ops.nxd.* in nxd_infer/ops/step.py.
#include "generation/columns.h"
#include "interface/registration.h"
#include "interface/tensors.h"

#include <algorithm>
#include <optional>
#include <tuple>

namespace nxd {
namespace {

using Fed = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Tensor made(const std::vector<int64_t>& shape, int32_t dtype) { return empty_strided_cpu(shape, dtype); }

int64_t* integers(const Tensor& x) { return static_cast<int64_t*>(x.data_ptr()); }

Fed step_rows(
    Tensor tokens_in, Tensor start_in, Tensor length_in, Tensor table, std::optional<Tensor> last,
    Tensor prompt_length_in, int64_t vocabulary, int64_t scratch) {
  if (tokens_in.dim() != 2 || table.dim() != 2 || table.size(0) != tokens_in.size(0) || table.size(1) < 1) {
    throw std::runtime_error(
        "nxd: step_rows: tokens are [rows, length] and the block table is [rows, slots]; got " + text(tokens_in) +
        " and " + text(table));
  }
  const int64_t B = tokens_in.size(0), S = tokens_in.size(1), columns = table.size(1);
  const Tensor tokens = checked(tokens_in, "tokens", ScalarType::Long, {B, S});
  const Tensor slots = checked(table, "block_table", ScalarType::Long, {B, columns});
  const Column<int64_t> start(start_in, "start", ScalarType::Long, B);
  const Column<int64_t> length(length_in, "length", ScalarType::Long, B);
  const Column<int64_t> prompt_length(prompt_length_in, "prompt_length", ScalarType::Long, B);
  std::optional<Column<int64_t>> remembered;
  if (last.has_value()) {
    if (last->dim() != 1) throw std::runtime_error("nxd: step_rows: last_token is [slots], got " + text(*last));
    remembered.emplace(*last, "last_token", ScalarType::Long, last->size(0));
  }
  const int32_t whole = aoti_torch_dtype_int64();
  Fed fed{
      made({B, S}, whole), made({B, S}, whole), made({B}, whole), made({B, S}, aoti_torch_dtype_bool()),
      made({B}, whole),    made({B}, whole)};
  const int64_t* token = integers(tokens);
  int64_t *ids = integers(std::get<0>(fed)), *positions = integers(std::get<1>(fed));
  auto* output = static_cast<bool*>(std::get<3>(fed).data_ptr());
  for (int64_t b = 0; b < B; b++) {
    const int64_t slot = length[b] > 0 ? integers(slots)[b * columns] : scratch;
    int64_t before = 0;
    if (remembered.has_value()) {
      check_slot(slot, last->size(0));
      before = (*remembered)[slot];
    }
    for (int64_t s = 0; s < S; s++) {
      const int64_t given = token[b * S + s], position = start[b] + s;
      const int64_t id = given < 0 && remembered.has_value() ? before : given;
      ids[b * S + s] = std::min(std::max<int64_t>(id, 0), vocabulary - 1);
      positions[b * S + s] = position;
      const bool guess = given < 0 || (S == 1 && start[b] > 0);
      output[b * S + s] = prompt_length[b] >= 0 ? position >= prompt_length[b] : guess;
    }
    integers(std::get<2>(fed))[b] = slot;
    integers(std::get<4>(fed))[b] = std::max<int64_t>(length[b] - 1, 0);
    integers(std::get<5>(fed))[b] = start[b] + length[b];
  }
  return fed;
}

void remember_last(Tensor last, Tensor token_in, Tensor start_in, Tensor slot_in, int64_t scratch, bool pieces) {
  const int64_t B = token_in.numel();
  const Column<int64_t> token(token_in, "token", ScalarType::Long, B), start(start_in, "start", ScalarType::Long, B);
  const Column<int64_t> slot(slot_in, "slot", ScalarType::Long, B);
  if (last.dim() != 1 || last.scalar_type() != ScalarType::Long || !last.is_contiguous()) {
    throw std::runtime_error("nxd: remember_last: last_token is int64 [slots], got " + text(last));
  }
  for (int64_t b = 0; b < B; b++) {
    int64_t own = slot[b];
    for (int64_t other = 0; pieces && other < B; other++) {
      if (slot[other] == slot[b] && start[other] > start[b]) own = scratch;
    }
    check_slot(own, last.size(0));
    integers(last)[own] = token[b];
  }
}

} // namespace
} // namespace nxd

NXD_LIBRARY(m) {
  m.def(
      "step_rows(Tensor tokens, Tensor start, Tensor length, Tensor block_table, Tensor? last_token, Tensor "
      "prompt_length, int vocabulary, int scratch) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "remember_last(Tensor(a!) last_token, Tensor token, Tensor start, Tensor slot, int scratch, bool pieces) -> ()");
}

NXD_IMPL(CPU, m) {
  m.impl("step_rows", TORCH_BOX(&nxd::step_rows));
  m.impl("remember_last", TORCH_BOX(&nxd::remember_last));
}
