// Device memory: host code that touches it faults.
//
// Each device has one anonymous file that is mapped twice. Tensors point into a view without any access rights; the
// kernels of the device use the other one, at a fixed distance.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <map>
#include <memory>
#include <vector>

#include "checker.h"

namespace emu {

constexpr int kDevices = 8;  // of a machine; each process has memory of its own on all of them

// Ranges of addresses that are free.
class FreeList {
 public:
  char* take(size_t size);  // first fit; null: none is large enough
  void give(char* address, size_t size);

 private:
  std::map<char*, size_t> free_;
};

// Memory of graphs: what is released while they are captured is used again by them alone, until all of them are gone.
class Pool {
 public:
  explicit Pool(int device) : device_(device) {}
  ~Pool();
  char* take(size_t size);  // null: the device has no more
  void give(char* address, size_t size);

 private:
  const int device_;
  FreeList free_;
  std::vector<std::pair<char*, size_t>> chunks_;  // taken from the device
};

// Addresses that are taken. Given back when nobody has them: neither their block nor what is queued to use them, which
// other devices would do before what is queued later.
class Extent {
 public:
  Extent(char* address, size_t size, int device, std::shared_ptr<Pool> pool)
      : address(address), size(size), device(device), pool_(std::move(pool)) {}
  Extent(const Extent&) = delete;
  Extent& operator=(const Extent&) = delete;
  ~Extent();

  char* const address;  // as tensors see it
  const size_t size;    // whole pages
  const int device;

 private:
  const std::shared_ptr<Pool> pool_;  // null: the device's memory
};

struct Block {
  std::shared_ptr<const Extent> extent;
  Shadow shadow;
  uint64_t number = 0;         // no other block has it
  uint64_t capture = 0;        // number of the capture that allocated it; 0: none did
  std::shared_ptr<char> life;  // ends with the block
};

// The allocation behind a storage or data pointer of this device; null where there is none (no bytes).
Block* block_of(const c10::DataPtr& pointer);

// The memory behind it, for as long as a queued operator needs it, whatever becomes of the storage; null: no bytes.
std::shared_ptr<const Extent> extent_of(const c10::Storage& storage);

// Where kernels find what lies at a device address.
char* kernel_address(const Block& block, const void* address);

c10::DeviceAllocator* device_allocator();

// Host memory that asynchronous copies may use.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

size_t total_memory();

}  // namespace emu
