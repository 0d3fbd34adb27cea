// A `str` argument of an operator. torch's conversion to std::string leaks 48 bytes of heap for every argument of every
// call.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>

namespace nxd {

struct Text : std::string {
  using std::string::string;
};

} // namespace nxd

namespace torch::stable::detail {

template <>
struct ToImpl<nxd::Text> {
  static nxd::Text call(StableIValue value, uint64_t, bool) {
    const auto handle = to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    nxd::Text text(data, length);
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};

} // namespace torch::stable::detail
