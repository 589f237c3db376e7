// Device memory: host code that touches it faults.
//
// Each device has one anonymous file that is mapped twice. Tensors point into a view without any access rights; the
// kernels of the device use the other one, at a fixed distance.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include "checker.h"

namespace emu {

constexpr int kDevices = 8;  // of a machine; each process has memory of its own on all of them

struct Block {
  char* address;  // as tensors see it
  size_t size;    // whole pages
  int device;
  Shadow shadow;
};

// The allocation behind a storage or data pointer of this device; null where there is none (no bytes).
Block* block_of(const c10::DataPtr& pointer);

// Where kernels find what lies at a device address.
char* kernel_address(const Block& block, const void* address);

c10::DeviceAllocator* device_allocator();

// Host memory that asynchronous copies may use.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

size_t total_memory();

}  // namespace emu
