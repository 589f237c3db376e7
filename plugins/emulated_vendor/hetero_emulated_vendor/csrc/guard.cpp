// What torch asks of a device: its guard (devices, streams, events), hooks, and random number generators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "guard.h"
#include "kernels.h"
#include "memory.h"
#include "streams.h"

namespace emu {

namespace {

c10::Device device_at(int index) { return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)}; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const int before = current_device();
    set_current_device(device.index());
    return device_at(before);
  }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices) set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return as_torch(current_stream(device.has_index() ? device.index() : current_device()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device_at(device.has_index() ? device.index() : current_device()), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return as_torch(new_stream(device.has_index() ? device.index() : current_device()));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->record(stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) static_cast<Event*>(event)->block(stream_of(stream));
  }
  bool queryEvent(void* event) const override { return event == nullptr || static_cast<Event*>(event)->query(); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) static_cast<Event*>(event)->synchronize();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    const auto& a = *static_cast<Event*>(first);
    const auto& b = *static_cast<Event*>(last);
    TORCH_CHECK(a.query() && b.query(), "both events must have been recorded and have passed");
    return std::chrono::duration<double, std::milli>(b.mark->time - a.mark->time).count();
  }

  bool queryStream(const c10::Stream& stream) const override {
    Stream& found = stream_of(stream);
    if (!found.idle()) return false;
    synchronize_stream(found);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_wait("Stream.synchronize");
    synchronize_stream(stream_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    count_wait("synchronize");
    synchronize_device(index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator()->recordStream(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Numbers of a device come from a generator of the host's kind, with a state of its own.
class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(int index)
      : GeneratorImpl(device_at(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::make_generator<at::CPUGeneratorImpl>(c10::detail::getNonDeterministicRandom())) {}

  at::Generator inner;

  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }

 private:
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->inner = inner.clone();
    return copy;
  }
};

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<DeviceGenerator>(index < 0 ? current_device() : index);
}

const at::Generator& default_generator_at(int index) {
  static auto* made = [] {
    auto* all = new std::vector<at::Generator>;
    for (int device = 0; device < kDevices; ++device) all->push_back(new_generator(device));
    return all;
  }();
  return made->at(index < 0 ? current_device() : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const int before = current_device();
    set_current_device(index);
    return static_cast<c10::DeviceIndex>(before);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator_at(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }
};

}  // namespace

at::Generator host_generator(const std::optional<at::Generator>& given, int device) {
  const at::Generator& chosen = given.has_value() && given->defined() ? *given : default_generator_at(device);
  if (chosen.device().type() == c10::kCPU) return chosen;
  return static_cast<const DeviceGenerator*>(chosen.unsafeGetGeneratorImpl())->inner;
}

at::Generator default_generator(int device) { return default_generator_at(device); }

void register_device() {
  static auto* hooks = new Hooks;
  c10::SetAllocator(c10::kPrivateUse1, device_allocator());
  at::RegisterPrivateUse1HooksInterface(hooks);
}

}  // namespace emu
