#include "kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "graphs.h"
#include "habits.h"

namespace emu {

namespace {

c10::Storage kernel_storage(const c10::Storage& storage) {
  const Block* block = block_of(storage.data_ptr());
  TORCH_CHECK(block != nullptr || storage.nbytes() == 0, "memory of another allocator on the emulated device");
  void* address = block != nullptr ? kernel_address(*block, storage.data_ptr().get()) : nullptr;
  c10::DataPtr pointer(address, address, [](void*) {}, c10::Device(c10::kCPU));
  return c10::Storage(
      c10::Storage::use_byte_size_t{}, storage.nbytes(), std::move(pointer), c10::GetCPUAllocator(), /*resizable=*/true);
}

at::Tensor over(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKey key) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

}  // namespace

Use use_of(const at::Tensor& tensor, Kind kind) {
  Block* block = block_of(tensor.storage().data_ptr());
  if (block == nullptr || tensor.numel() == 0) return {nullptr, kind, 0, 0};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const size_t item = tensor.itemsize();
  const size_t begin = tensor.storage_offset() * item;
  return {&block->shadow, kind, begin, begin + (last + 1) * item};
}

at::Tensor kernel_view(const at::Tensor& tensor) {
  return over(kernel_storage(tensor.storage()), tensor, c10::DispatchKey::CPU);
}

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  if (storage.nbytes() != 0) refuse_in_capture("a change of the size of memory");
  const Block* before = block_of(storage.data_ptr());
  c10::DataPtr pointer = device_allocator()->allocate(bytes);
  Block* after = block_of(pointer);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (before != nullptr && kept != 0) {
    begin_operator(storage.device().index(), "aten::resize_", {
        {const_cast<Shadow*>(&before->shadow), Kind::Read, 0, kept},
        {&after->shadow, Kind::Write, 0, kept},
    });
    std::memcpy(kernel_address(*after, pointer.get()), kernel_address(*before, storage.data()), kept);
  }
  storage.set_data_ptr_noswap(std::move(pointer));
  storage.set_nbytes(bytes);
}

namespace {

std::vector<Use> of_memory(const std::vector<Use>& uses) {
  std::vector<Use> real;
  for (const Use& use : uses) {
    if (use.shadow != nullptr) real.push_back(use);
  }
  return real;
}

}  // namespace

Moment begin_operator(int device, const std::string& name, const std::vector<Use>& uses) {
  Stream& stream = current_stream(device);
  stream.drain();
  if (name.rfind("aten::", 0) == 0 && !of_memory(uses).empty()) Slots::get().await_one();  // neither views nor copies of the host
  return Checker::get().run(stream.actor, name, of_memory(uses));
}

void queue_operator(
    Stream& stream, const std::string& name, const std::vector<Use>& uses, std::function<void()> kernel) {
  Checker::get().run(stream.actor, name, of_memory(uses));
  stream.enqueue([kernel = std::move(kernel)] {
    Slots::get().await_one();
    kernel();
  });
}

at::Tensor Views::view(const at::Tensor& tensor) {
  auto known = views_.find(tensor.unsafeGetTensorImpl());
  if (known != views_.end()) return known->second;
  const c10::StorageImpl* key = tensor.storage().unsafeGetStorageImpl();
  auto [place, added] = kernel_storages_.try_emplace(key);
  if (added) {
    place->second = kernel_storage(tensor.storage());
    device_storages_.emplace(place->second.unsafeGetStorageImpl(), tensor.storage());
  }
  at::Tensor made = over(place->second, tensor, c10::DispatchKey::CPU);
  views_.emplace(tensor.unsafeGetTensorImpl(), made);
  originals_.emplace(made.unsafeGetTensorImpl(), tensor);
  return made;
}

at::Tensor Views::result(const at::Tensor& returned, int device, std::vector<at::Tensor>& fresh) {
  if (!returned.defined() || returned.is_privateuseone()) return returned;
  auto argument = originals_.find(returned.unsafeGetTensorImpl());
  if (argument != originals_.end()) return argument->second;
  auto storage = device_storages_.find(returned.storage().unsafeGetStorageImpl());
  if (storage != device_storages_.end()) return over(storage->second, returned, c10::DispatchKey::PrivateUse1);
  const c10::Device where(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
  at::Tensor made = at::empty_strided(returned.sizes(), returned.strides(), returned.options().device(where));
  if (made.numel() != 0) kernel_view(made).copy_(returned);
  fresh.push_back(made);
  return made;
}

void Views::take_over(const at::Tensor& tensor) {
  auto known = views_.find(tensor.unsafeGetTensorImpl());
  if (known == views_.end()) return;
  const at::Tensor& view = known->second;
  c10::StorageImpl* mine = tensor.storage().unsafeGetStorageImpl();
  const c10::Storage& theirs = view.storage();
  const Block* block = block_of(mine->data_ptr());
  const void* before = block != nullptr ? kernel_address(*block, mine->data()) : nullptr;
  if (theirs.data() != before) {
    c10::DataPtr pointer = device_allocator()->allocate(theirs.nbytes());
    const Block* now = block_of(pointer);
    if (now != nullptr) std::memcpy(kernel_address(*now, pointer.get()), theirs.data(), theirs.nbytes());
    mine->set_data_ptr_noswap(std::move(pointer));
    mine->set_nbytes(theirs.nbytes());
  }
  if (tensor.sizes() != view.sizes() || tensor.strides() != view.strides()) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
  }
}

}  // namespace emu
