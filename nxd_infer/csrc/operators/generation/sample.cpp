// The sampling operators: each row is processed by one thread, so that its result depends on nothing else. Schemas and
// meanings are those of torch.ops.nxd.* in nxd_infer/ops/sampling.py and adjust.py.
#include "generation/adjust.h"
#include "generation/columns.h"
#include "machine/parallel.h"
#include "interface/registration.h"
#include "generation/sample_row.h"
#include "interface/tensors.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace nxd {
namespace {

using Maybe = std::optional<Tensor>;
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;

constexpr int64_t kGrain = 32 * 1024;  // logits that justify a thread

struct Settings {
  Settings(
      int64_t rows, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
      const Tensor& seed, const Tensor& position)
      : temperature(temperature, "temperature", ScalarType::Float, rows),
        top_k(top_k, "top_k", ScalarType::Long, rows),
        top_p(top_p, "top_p", ScalarType::Float, rows),
        min_p(min_p, "min_p", ScalarType::Float, rows),
        seed(seed, "seed", ScalarType::Long, rows),
        position(position, "position", ScalarType::Long, rows) {}

  SampleSettings operator[](int64_t row) const {
    return SampleSettings{temperature[row], top_k[row], top_p[row], min_p[row], seed[row], position[row]};
  }

  Column<float> temperature;
  Column<int64_t> top_k;
  Column<float> top_p, min_p;
  Column<int64_t> seed, position;
};

// [B, V] of logits, V > 0.
Tensor checked_logits(const Tensor& x) {
  if (x.dim() != 2 || x.size(1) < 1) {
    throw std::runtime_error("nxd: sample: logits have shape " + text(shape_of(x)) + ", not [rows, vocabulary]");
  }
  return checked(x, "logits", ScalarType::Float, shape_of(x));
}

// An optional tensor of `width` values per line; at(line) is null if the call has none.
template <typename T>
struct Lines {
  Lines(const Maybe& x, const char* name, ScalarType dtype, const std::vector<int64_t>& shape)
      : width(shape.size() == 1 ? 1 : shape[1]) {
    if (x.has_value()) {
      tensor = checked(*x, name, dtype, shape);
      first = static_cast<const T*>(tensor->data_ptr());
    }
  }
  const T* at(int64_t line) const { return first == nullptr ? nullptr : first + line * width; }
  int64_t width;
  Maybe tensor;
  const T* first = nullptr;
};

Results sample_adjusted(
    Tensor logits_in, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor position,
    int64_t top, Maybe allowed_in, Maybe bias_ids_in, Maybe bias_values_in, Maybe counts_in, Maybe seen_in,
    Maybe slot_in, Maybe presence_in, Maybe frequency_in, Maybe repetition_in) {
  const Tensor raw = checked_logits(logits_in);
  const int64_t rows = raw.size(0), vocabulary = raw.size(1);
  if (top < 0) throw std::runtime_error("nxd: sample: top = " + std::to_string(top) + " is negative");
  const Settings settings(rows, temperature, top_k, top_p, min_p, seed, position);
  const Lines<int32_t> allowed(allowed_in, "allowed", ScalarType::Int, {rows, (vocabulary + 31) / 32});
  if (bias_ids_in.has_value() != bias_values_in.has_value()) {
    throw std::runtime_error("nxd: sample: bias_ids and bias_values come together");
  }
  const int64_t biases = bias_ids_in.has_value() && bias_ids_in->dim() == 2 ? bias_ids_in->size(1) : 0;
  const Lines<int64_t> bias_ids(bias_ids_in, "bias_ids", ScalarType::Long, {rows, biases});
  const Lines<float> bias_values(bias_values_in, "bias_values", ScalarType::Float, {rows, biases});
  const Maybe& history = counts_in.has_value() ? counts_in : seen_in;
  const Lines<int64_t> slot(history.has_value() ? slot_in : Maybe(), "slot", ScalarType::Long, {rows});
  const int64_t slots = slot.tensor.has_value() && history->dim() > 0 ? history->size(0) : rows;
  const Lines<int32_t> counts(counts_in, "counts", ScalarType::Int, {slots, vocabulary});
  const Lines<bool> seen(seen_in, "seen", ScalarType::Bool, {slots, vocabulary});
  const Lines<float> presence(presence_in, "presence_penalty", ScalarType::Float, {rows});
  const Lines<float> frequency(frequency_in, "frequency_penalty", ScalarType::Float, {rows});
  const Lines<float> repetition(repetition_in, "repetition_penalty", ScalarType::Float, {rows});
  for (int64_t row = 0; slot.first != nullptr && row < rows; row++) {
    check_slot(slot.first[row], slots);
  }
  Tensor token = empty_strided_cpu({rows}, aoti_torch_dtype_int64());
  Tensor logprob = empty_strided_cpu({rows}, aoti_torch_dtype_float32());
  Tensor top_ids = empty_strided_cpu({rows, top}, aoti_torch_dtype_int64());
  Tensor top_logprobs = empty_strided_cpu({rows, top}, aoti_torch_dtype_float32());
  const auto* logits = static_cast<const float*>(raw.data_ptr());
  auto* tokens = static_cast<int64_t*>(token.data_ptr());
  auto* logprobs = static_cast<float*>(logprob.data_ptr());
  auto* ids = static_cast<int64_t*>(top_ids.data_ptr());
  auto* values = static_cast<float*>(top_logprobs.data_ptr());
  parallel_for(0, rows, std::max<int64_t>(1, kGrain / vocabulary), [&](int64_t begin, int64_t end) {
    static thread_local SampleScratch scratch;
    for (int64_t row = begin; row < end; row++) {
      const int64_t own = slot.first == nullptr ? row : slot.first[row];
      const Adjustment adjustment{
          allowed.at(row), bias_ids.at(row), bias_values.at(row), biases, counts.at(own),
          seen.at(own),    presence.at(row), frequency.at(row),   repetition.at(row)};
      const float* of_row = logits + row * vocabulary;
      const float* adjusted = adjust_row(of_row, vocabulary, adjustment, scratch.adjusted);
      const SampleResult result{tokens + row, logprobs + row, ids + row * top, values + row * top};
      sample_row(adjusted, of_row, vocabulary, settings[row], top, scratch, result);
    }
  });
  return {token, logprob, top_ids, top_logprobs};
}

// Counts the tokens of a step in the slots of their rows.
void remember_tokens(
    Tensor counts_in, Tensor seen_in, Tensor ids_in, Tensor output_in, Tensor start_in, Tensor length_in,
    Tensor slot_in) {
  if (counts_in.dim() != 2 || ids_in.dim() != 2 || !counts_in.is_contiguous() || !seen_in.is_contiguous()) {
    throw std::runtime_error(
        "nxd: remember_tokens: counts and seen are contiguous [slots, vocabulary] and ids is [rows, length]; got " +
        text(shape_of(counts_in)) + ", " + text(shape_of(seen_in)) + " and " + text(shape_of(ids_in)));
  }
  const int64_t slots = counts_in.size(0), vocabulary = counts_in.size(1);
  const int64_t rows = ids_in.size(0), steps = ids_in.size(1);
  checked(counts_in, "counts", ScalarType::Int, {slots, vocabulary});
  checked(seen_in, "seen", ScalarType::Bool, {slots, vocabulary});
  const Tensor ids = checked(ids_in, "ids", ScalarType::Long, {rows, steps});
  const Tensor output = checked(output_in, "output", ScalarType::Bool, {rows, steps});
  const Column<int64_t> start(start_in, "start", ScalarType::Long, rows);
  const Column<int64_t> length(length_in, "length", ScalarType::Long, rows);
  const Column<int64_t> slot(slot_in, "slot", ScalarType::Long, rows);
  auto* counts = static_cast<int32_t*>(counts_in.data_ptr());
  auto* seen = static_cast<bool*>(seen_in.data_ptr());
  const auto* id = static_cast<const int64_t*>(ids.data_ptr());
  const auto* is_output = static_cast<const bool*>(output.data_ptr());
  for (int64_t row = 0; row < rows; row++) {  // first: another row may have more of the same sequence
    if (length[row] <= 0) continue;
    check_slot(slot[row], slots);
    if (start[row] != 0) continue;
    std::fill_n(counts + slot[row] * vocabulary, vocabulary, 0);
    std::fill_n(seen + slot[row] * vocabulary, vocabulary, false);
  }
  for (int64_t row = 0; row < rows; row++) {
    const int64_t count = std::min(length[row], steps);
    if (count <= 0) continue;
    int32_t* own_counts = counts + slot[row] * vocabulary;
    bool* own_seen = seen + slot[row] * vocabulary;
    for (int64_t i = row * steps; i < row * steps + count; i++) {
      if (id[i] < 0 || id[i] >= vocabulary) {
        throw std::runtime_error(
            "nxd: remember_tokens: token " + std::to_string(id[i]) + " is not one of " + std::to_string(vocabulary));
      }
      if (is_output[i]) {
        own_counts[id[i]]++;
      } else {
        own_seen[id[i]] = true;
      }
    }
  }
}

} // namespace
} // namespace nxd

NXD_LIBRARY(m) {
  m.def(
      "sample_adjusted(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, "
      "Tensor position, int top, Tensor? allowed, Tensor? bias_ids, Tensor? bias_values, Tensor? counts, Tensor? seen, "
      "Tensor? slot, Tensor? presence_penalty, Tensor? frequency_penalty, Tensor? repetition_penalty) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "remember_tokens(Tensor(a!) counts, Tensor(b!) seen, Tensor ids, Tensor output, Tensor start, Tensor length, "
      "Tensor slot) -> ()");
}

NXD_IMPL(CPU, m) {
  m.impl("sample_adjusted", TORCH_BOX(&nxd::sample_adjusted));
  m.impl("remember_tokens", TORCH_BOX(&nxd::remember_tokens));
}
