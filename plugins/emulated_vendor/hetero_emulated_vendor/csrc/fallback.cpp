// Every operator without a kernel of its own: the host's kernel runs on the device's memory, on the current stream.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "guard.h"
#include "kernels.h"

namespace emu {

namespace {

// What one call does, gathered from its stack.
struct Call {
  const c10::FunctionSchema& schema;
  torch::jit::Stack& stack;
  size_t first;  // argument on the stack
  Views views;
  int device = -1;
  std::vector<Use> uses;
  std::vector<at::Tensor> written;
  std::vector<at::Tensor> arguments;  // device tensors stay alive until the kernel has run

  c10::IValue& value(size_t i) { return stack[first + i]; }

  bool may_lie_on_host(const at::Tensor& tensor, const std::string& name) const {
    // As elsewhere: numbers, and index tensors, which are copied with a wait.
    return tensor.dim() == 0 || name == "indices";
  }

  void require_device(const at::Tensor& tensor, const std::string& argument) {
    if (!tensor.defined()) return;
    if (!on_device(tensor)) {
      TORCH_CHECK(
          tensor.is_cpu() && may_lie_on_host(tensor, argument), schema.name(), ": argument ", argument,
          " is a tensor on ", tensor.device(), ", not on the emulated device");
      return;
    }
    const int index = tensor.device().index();
    TORCH_CHECK(
        device == -1 || device == index, schema.name(), ": wrong device: argument ", argument, " is on emu:", index,
        ", other arguments on emu:", device);
    device = index;
  }
};

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool only_views(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && !argument.alias_info()->isWrite();
}

template <typename F>
void each_tensor(const c10::IValue& value, F&& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor()) visit(item.toTensor());
    }
  }
}

template <typename F>
c10::IValue changed(const c10::IValue& value, F&& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor.has_value() ? std::make_optional(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

void look(Call& call) {
  const auto& arguments = call.schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = call.value(i);
    each_tensor(value, [&](const at::Tensor& tensor) { call.require_device(tensor, arguments[i].name()); });
    if (value.isDevice() && value.toDevice().is_privateuseone() && call.device == -1) {
      const c10::Device device = value.toDevice();
      call.device = device.has_index() ? device.index() : current_device();
    }
  }
  if (call.device == -1) call.device = current_device();
}

void replace_arguments(Call& call) {
  const auto& arguments = call.schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = call.value(i);
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (!on_device(tensor)) return;
      call.arguments.push_back(tensor);
      if (writes(arguments[i])) call.written.push_back(tensor);
      if (!only_views(arguments[i])) {
        call.uses.push_back(use_of(tensor, writes(arguments[i]) ? Kind::Write : Kind::Read));
      }
    });
    if (value.isDevice() && value.toDevice().is_privateuseone()) {
      value = c10::Device(c10::kCPU);
    } else if (arguments[i].name() == "generator" && (value.isNone() || value.isGenerator())) {
      const auto given = value.isNone() ? std::nullopt : std::make_optional(value.toGenerator());
      value = host_generator(given, call.device);
    } else {
      value = changed(
          value, [&](const at::Tensor& tensor) { return on_device(tensor) ? call.views.view(tensor) : tensor; });
    }
  }
}

void replace_results(Call& call, const std::string& name) {
  for (const at::Tensor& tensor : call.written) call.views.take_over(tensor);
  std::vector<at::Tensor> fresh;
  const size_t results = call.schema.returns().size();
  bool tells_host = false;
  for (size_t i = call.stack.size() - results; i < call.stack.size(); ++i) {
    c10::IValue& value = call.stack[i];
    tells_host |= value.isScalar() || value.isBool();
    value = changed(
        value, [&](const at::Tensor& tensor) { return call.views.result(tensor, call.device, fresh); });
  }
  std::vector<Use> uses;
  for (const at::Tensor& tensor : fresh) uses.push_back(use_of(tensor, Kind::Write));
  if (!uses.empty()) begin_operator(call.device, name, uses);
  if (tells_host) synchronize_stream(current_stream(call.device));
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  Call call{schema, *stack, stack->size() - schema.arguments().size()};
  look(call);
  const c10::DeviceGuard guard(c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(call.device)));
  replace_arguments(call);
  begin_operator(call.device, schema.name(), call.uses);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  replace_results(call, schema.name());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

}  // namespace

}  // namespace emu
