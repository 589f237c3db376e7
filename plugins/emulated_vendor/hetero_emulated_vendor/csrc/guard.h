#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace emu {

// The generator of host numbers behind a device's: the one that is given, or the device's own.
at::Generator host_generator(const std::optional<at::Generator>& given, int device);
at::Generator default_generator(int device);

// Make the device known to torch.
void register_device();

}  // namespace emu
