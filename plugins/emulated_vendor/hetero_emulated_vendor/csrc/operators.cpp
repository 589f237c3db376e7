// Operators with kernels of their own: memory, views, and copies between host and device.
#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorShape.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "copies.h"
#include "graphs.h"
#include "habits.h"
#include "kernels.h"

namespace emu {

namespace {

constexpr c10::DispatchKeySet kKey(c10::DispatchKey::PrivateUse1);

c10::Device chosen(std::optional<at::Device> device) {
  const int index = device.has_value() && device->has_index() ? device->index() : current_device();
  return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

void require_width(std::optional<at::ScalarType> dtype) {
  TORCH_CHECK(
      !habits().no_fp64 || c10::dtype_or_default(dtype) != c10::ScalarType::Double,
      "the emulated device has no fp64");
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  require_width(dtype);
  const c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_generic(size, device_allocator(), kKey, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  require_width(dtype);
  const c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKey, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!format.has_value() || *format == at::MemoryFormat::Contiguous, "resize_: only contiguous tensors");
  const c10::DeviceGuard guard(self.device());
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const size_t bytes = (self.storage_offset() + self.numel()) * self.itemsize();
  if (self.numel() != 0 && bytes > self.storage().nbytes()) {
    resize_storage(*self.storage().unsafeGetStorageImpl(), bytes);
  }
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  count_wait("aten::_local_scalar_dense");
  begin_operator(self.device().index(), "aten::_local_scalar_dense", {use_of(self, Kind::Read)});
  const at::Scalar value = at::_local_scalar_dense(kernel_view(self));
  synchronize_stream(current_stream(self.device().index()));
  return value;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  copy_tensor(self, to, non_blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (self.sizes() != to.sizes()) to.resize_(self.sizes());
  copy_tensor(self, to, false);
  return to;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("record_stream", record_stream);
}

}  // namespace

}  // namespace emu
