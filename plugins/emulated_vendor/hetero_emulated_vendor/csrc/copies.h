// Copies between tensors of host and device.
//
// An asynchronous copy to pinned host memory delivers only once the host has waited for it: until then the buffer holds
// NaN (integers: -1). One from pinned memory must find the buffer unchanged when the host waits.
#pragma once

#include <ATen/core/Tensor.h>

namespace emu {

void copy_tensor(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

// Throws if the host may not read this host tensor yet.
void check_host_read(const at::Tensor& tensor);

}  // namespace emu
