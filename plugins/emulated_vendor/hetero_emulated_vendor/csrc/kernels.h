// Device tensors as the kernels see them, and what an operator does to them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "memory.h"
#include "streams.h"

namespace emu {

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// The bytes of its storage between which a tensor lies; views with gaps count as a whole.
Use use_of(const at::Tensor& tensor, Kind kind);

// A host tensor on the same bytes, by their kernel address; valid as long as the device tensor.
at::Tensor kernel_view(const at::Tensor& tensor);

// Give a storage as many bytes; what lies there is kept as far as there are.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

// Record an operator on the current stream of `device`, after what is queued there. Throws races.
Moment begin_operator(int device, const std::string& name, const std::vector<Use>& uses);

// Record an operator on `stream`, and run it there after what is queued, without holding up the host. `kernel` keeps
// what it uses alive. Throws races.
void queue_operator(
    Stream& stream, const std::string& name, const std::vector<Use>& uses, std::function<void()> kernel);

// One call of an operator: views for the kernel, and the way back.
class Views {
 public:
  at::Tensor view(const at::Tensor& tensor);
  // The device tensor for what a kernel returned: an argument, a view of one, or a copy on `device`.
  at::Tensor result(const at::Tensor& returned, int device, std::vector<at::Tensor>& fresh);
  // Give an argument that the kernel resized its new shape and bytes.
  void take_over(const at::Tensor& tensor);

 private:
  std::unordered_map<const c10::StorageImpl*, c10::Storage> kernel_storages_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> device_storages_;  // by the kernel's
  std::unordered_map<const c10::TensorImpl*, at::Tensor> views_;               // by the device's
  std::unordered_map<const c10::TensorImpl*, at::Tensor> originals_;           // by the kernel's
};

}  // namespace emu
