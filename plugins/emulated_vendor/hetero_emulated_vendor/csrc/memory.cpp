#include "memory.h"

#include <c10/core/CPUAllocator.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>

#include "graphs.h"
#include "habits.h"
#include "streams.h"

namespace emu {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGiveBack = 1 << 20;  // blocks from here on give their pages back to the system

class Arena {
 public:
  // Both views of `size` bytes; pages are there once they are touched.
  void open(size_t size) {
    owner_ = getpid();
    file_ = memfd_create("emulated_vendor", MFD_CLOEXEC);
    TORCH_CHECK(file_ >= 0 && ftruncate(file_, static_cast<off_t>(size)) == 0, "no memory for the emulated device");
    void* seen = mmap(nullptr, size, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file_, 0);
    void* used = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
    TORCH_CHECK(seen != MAP_FAILED && used != MAP_FAILED, "no memory for the emulated device");
    madvise(used, size, MADV_DONTFORK);  // as a device, it belongs to one process
    seen_ = static_cast<char*>(seen);
    distance_ = static_cast<char*>(used) - seen_;
    free_.give(seen_, size);
  }

  char* take(size_t size) {
    TORCH_CHECK(owner_ == getpid(), "the emulated device belongs to the process that used it first, not to a fork");
    char* address = free_.take(size);
    if (address == nullptr) return nullptr;
    taken_ += size;
    peak_ = std::max(peak_, taken_);
    return address;
  }

  void give(char* address, size_t size) {
    taken_ -= size;
    if (size >= kGiveBack) {
      fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, address - seen_, static_cast<off_t>(size));
    }
    free_.give(address, size);
  }

  bool opened() const { return seen_ != nullptr; }
  ptrdiff_t distance() const { return distance_; }
  size_t taken() const { return taken_; }
  size_t peak() const { return peak_; }
  void reset_peak() { peak_ = taken_; }

 private:
  char* seen_ = nullptr;
  ptrdiff_t distance_ = 0;
  size_t taken_ = 0, peak_ = 0;
  int file_ = -1;
  pid_t owner_ = 0;
  FreeList free_;
};

struct Device {
  std::mutex mutex;
  Arena arena;
};

Device& device_of(int index) {
  static auto* devices = new Device[kDevices];
  return devices[index];
}

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  Checker::get().freed(block->shadow);
  delete block;
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int index = current_device();
    const c10::Device where(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index));
    if (bytes == 0) return {nullptr, nullptr, &release, where};
    Checker::get().raise_found();
    const size_t size = (bytes + kPage - 1) / kPage * kPage;
    Device& device = device_of(index);
    Recording* recording = current_stream(index).recording;
    const std::shared_ptr<Pool> pool = recording != nullptr ? recording->pool() : nullptr;
    char* address = nullptr;
    {
      std::lock_guard<std::mutex> lock(device.mutex);
      if (!device.arena.opened()) device.arena.open(total_memory());
      address = pool != nullptr ? pool->take(size) : device.arena.take(size);
    }
    if (address == nullptr && habits().freeing_waits) settle_device(index);
    {
      std::lock_guard<std::mutex> lock(device.mutex);
      TORCH_CHECK_WITH(
          OutOfMemoryError, address != nullptr, "emu out of memory. Tried to allocate ", bytes, " bytes on emu:", index,
          ": ", device.arena.taken(), " of ", total_memory(), " bytes are taken");
    }
    static std::atomic<uint64_t> blocks{0};
    auto* block = new Block{
        std::make_shared<Extent>(address, size, index, pool), {}, ++blocks, 0, std::make_shared<char>()};
    if (recording != nullptr) recording->allocated(*block);
    block->shadow.block = block;
    block->shadow.device = index;
    block->shadow.bytes = bytes;
    block->shadow.owner = current_stream(index).actor;
    Checker::get().allocated(block->shadow);
    std::memset(kernel_address(*block, address), 0xFF, size);  // NaN: nobody may count on zeros
    return {address, block, &release, where};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    const ptrdiff_t distance = device_of(current_device()).arena.distance();
    std::memcpy(static_cast<char*>(to) + distance, static_cast<const char*>(from) + distance, bytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (Block* block = block_of(pointer)) Checker::get().record_stream(block->shadow, stream_of(stream).actor);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    Device& device = device_of(index);
    std::lock_guard<std::mutex> lock(device.mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*bytes)[0].current = static_cast<int64_t>(device.arena.taken());
      (*bytes)[0].peak = static_cast<int64_t>(device.arena.peak());
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    Device& device = device_of(index);
    std::lock_guard<std::mutex> lock(device.mutex);
    device.arena.reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    Device& device = device_of(index);
    std::lock_guard<std::mutex> lock(device.mutex);
    return {total_memory() - device.arena.taken(), total_memory()};
  }
};

// Pinned memory is host memory whose addresses are remembered.
struct Pinned {
  std::mutex mutex;
  std::map<const char*, size_t> ranges;
};

Pinned& pinned() {
  static auto* all = new Pinned;
  return *all;
}

void release_pinned(void* address) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  pinned().ranges.erase(static_cast<const char*>(address));
  std::free(address);
}

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release_pinned, c10::kCPU};
    void* address = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
    TORCH_CHECK(address != nullptr, "no host memory for ", bytes, " pinned bytes");
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().ranges[static_cast<const char*>(address)] = bytes;
    return {address, address, &release_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

char* FreeList::take(size_t size) {
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < size) continue;
    char* address = it->first;
    const size_t rest = it->second - size;
    free_.erase(it);
    if (rest != 0) free_[address + size] = rest;
    return address;
  }
  return nullptr;
}

void FreeList::give(char* address, size_t size) {
  auto next = free_.lower_bound(address);
  if (next != free_.end() && address + size == next->first) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == address) {
      before->second += size;
      return;
    }
  }
  free_[address] = size;
}

Extent::~Extent() {
  Device& on = device_of(device);
  std::lock_guard<std::mutex> lock(on.mutex);
  if (pool_ != nullptr) {
    pool_->give(address, size);
  } else {
    on.arena.give(address, size);
  }
}

char* Pool::take(size_t size) {  // the device's mutex is held
  if (char* address = free_.take(size)) return address;
  char* address = device_of(device_).arena.take(size);
  if (address != nullptr) chunks_.emplace_back(address, size);
  return address;
}

void Pool::give(char* address, size_t size) { free_.give(address, size); }

Pool::~Pool() {
  std::lock_guard<std::mutex> lock(device_of(device_).mutex);
  for (const auto& [address, size] : chunks_) device_of(device_).arena.give(address, size);
}

size_t total_memory() {
  static const size_t bytes = [] {
    const char* text = std::getenv("HETERO_EMULATED_MEMORY_MIB");
    const long mib = text != nullptr ? std::atol(text) : 0;
    return static_cast<size_t>(mib > 0 ? mib : 8192) << 20;
  }();
  return bytes;
}

Block* block_of(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &release ? static_cast<Block*>(pointer.get_context()) : nullptr;
}

std::shared_ptr<const Extent> extent_of(const c10::Storage& storage) {
  const Block* block = block_of(storage.data_ptr());
  return block != nullptr ? block->extent : nullptr;
}

char* kernel_address(const Block& block, const void* address) {
  return static_cast<char*>(const_cast<void*>(address)) + device_of(block.extent->device).arena.distance();
}

c10::DeviceAllocator* device_allocator() {
  static auto* memory = new DeviceMemory;
  return memory;
}

c10::Allocator* pinned_allocator() {
  static auto* memory = new PinnedMemory;
  return memory;
}

bool is_pinned(const void* address) {
  const auto* at = static_cast<const char*>(address);
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto it = pinned().ranges.upper_bound(at);
  return it != pinned().ranges.begin() && at < std::prev(it)->first + std::prev(it)->second;
}

}  // namespace emu
