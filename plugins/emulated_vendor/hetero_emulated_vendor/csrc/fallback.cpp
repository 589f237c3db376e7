// Every operator without a kernel of its own: the host's kernel runs on the device's memory, on the current stream.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <algorithm>
#include <set>

#include "graphs.h"
#include "guard.h"
#include "habits.h"
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
  std::set<size_t> host;              // arguments that are tensors of the host, not numbers

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

// Returns those with memory of their own.
std::vector<at::Tensor> replace_results(Call& call, const std::string& name) {
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
  if (tells_host) {
    count_wait(name);
    synchronize_stream(current_stream(call.device));
  }
  return fresh;
}

// Whether other devices would hold up the host here: for a shape that depends on values, or for indices that the host
// has, which are copied from pageable memory.
bool holds_up_host(const Call& call) {
  static const std::set<std::string> by_values{
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::bincount"};
  const auto& arguments = call.schema.arguments();
  if (by_values.count(call.schema.name()) != 0) return true;
  bool found = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = call.stack[call.first + i];
    if (call.schema.name() == "aten::repeat_interleave" && arguments[i].name() == "output_size") {
      found |= value.isNone();
    }
    if (arguments[i].name() != "indices" || !value.isOptionalTensorList()) continue;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (!tensor.has_value() || !tensor->defined() || tensor->dim() == 0) continue;
      found |= !on_device(*tensor) || tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte;
    }
  }
  return found;
}

// Whether an operator is given several tensors, all of these sizes: then an output with them is not resized.
bool all_alike(const Call& call, at::IntArrayRef sizes) {
  int count = 0;
  bool alike = true;
  for (size_t i = call.first; i < call.stack.size(); ++i) {
    each_tensor(call.stack[i], [&](const at::Tensor& tensor) {
      ++count;
      alike &= tensor.defined() && tensor.sizes() == sizes;
    });
  }
  return alike && count > 1;
}

// Whether an output is one of the inputs: then it is not resized either.
bool is_input(const Call& call, const at::Tensor& output) {
  int count = 0;
  for (size_t i = call.first; i < call.stack.size(); ++i) {
    each_tensor(call.stack[i], [&](const at::Tensor& tensor) { count += tensor.is_same(output); });
  }
  return count > 1;
}

// The arguments that an operator returns, if it returns nothing else and writes into memory that is there: then it can
// run later, on its stream's thread.
std::optional<std::vector<size_t>> returned_arguments(const Call& call) {
  const auto& arguments = call.schema.arguments();
  bool any = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    bool all_here = true;
    each_tensor(call.stack[call.first + i], [&](const at::Tensor& tensor) {
      const bool number = tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number();
      all_here &= !tensor.defined() || on_device(tensor) || number;
      if (!writes(arguments[i])) return;
      any = true;
      if (!tensor.defined()) all_here = false;
      else if (tensor.numel() == 0) all_here &= all_alike(call, tensor.sizes()) || is_input(call, tensor);  // not resized
    });
    if (!all_here || call.stack[call.first + i].isGenerator()) return std::nullopt;
  }
  if (!any) return std::nullopt;
  std::vector<size_t> places;
  for (const c10::Argument& result : call.schema.returns()) {
    if (!writes(result)) return std::nullopt;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (writes(arguments[i]) && arguments[i].alias_info()->beforeSets() == result.alias_info()->beforeSets()) {
        places.push_back(i);
      }
    }
  }
  if (places.size() != call.schema.returns().size()) return std::nullopt;
  return places;
}

void run_later(const c10::OperatorHandle& op, Call& call, Stream& stream, const std::vector<size_t>& returned) {
  torch::jit::Stack results;
  for (const size_t i : returned) results.push_back(call.value(i));
  replace_arguments(call);
  std::vector<std::shared_ptr<const Extent>> kept;  // not the tensors, whose end may need Python's lock
  for (const at::Tensor& tensor : call.arguments) kept.push_back(extent_of(tensor.storage()));
  std::vector<std::pair<at::Tensor, std::vector<int64_t>>> shapes;
  for (const at::Tensor& tensor : call.written) shapes.emplace_back(call.views.view(tensor), tensor.sizes().vec());
  torch::jit::Stack arguments(call.stack.begin() + static_cast<ptrdiff_t>(call.first), call.stack.end());
  queue_operator(
      stream, call.schema.name(), call.uses,
      [op, arguments = std::move(arguments), kept = std::move(kept), shapes = std::move(shapes)]() mutable {
        at::AutoDispatchBelowADInplaceOrView below;
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
        for (const auto& [view, sizes] : shapes) {
          TORCH_CHECK(view.sizes() == at::IntArrayRef(sizes), op.schema().name(), " resized what it writes to");
        }
      });
  call.stack.resize(call.first);
  for (c10::IValue& result : results) call.stack.push_back(std::move(result));
}

std::vector<at::Tensor> tensors_in(const torch::jit::Stack& stack, size_t first) {
  std::vector<at::Tensor> found;
  for (size_t i = first; i < stack.size(); ++i) {
    each_tensor(stack[i], [&](const at::Tensor& tensor) { found.push_back(tensor); });
  }
  return found;
}

// What a graph does in place of a call: the same kernel with the same arguments, and its results where the capture put
// them.
struct Again {
  c10::OperatorHandle op;
  torch::jit::Stack arguments;
  std::vector<at::Tensor> results;  // as the kernels see them; undefined: no memory of the result's own

  void operator()() const {
    torch::jit::Stack stack = arguments;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    const std::vector<at::Tensor> made = tensors_in(stack, 0);
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].defined()) at::Tensor(results[i]).copy_(made[i]);
    }
  }
};

// Its arguments, of which those on the host are taken as they are now.
torch::jit::Stack kept_arguments(Call& call) {
  torch::jit::Stack kept;
  for (size_t i = call.first; i < call.stack.size(); ++i) {
    const c10::IValue& value = call.stack[i];
    const bool of_host = value.isTensor() && call.host.count(i - call.first) != 0;
    kept.push_back(of_host ? c10::IValue(value.toTensor().clone()) : value);
  }
  return kept;
}

void record(const c10::OperatorHandle& op, Call& call, Recording& recording) {
  const std::string& name = call.schema.name();
  for (const c10::Argument& argument : call.schema.arguments()) {
    if (argument.name() == "generator") recording.refuse("random numbers of a generator, by " + name);
  }
  if (holds_up_host(call)) count_wait(name);
  bool own = true;
  std::vector<std::pair<size_t, at::Tensor>> empty;  // they may get memory
  const auto& arguments = call.schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    each_tensor(call.value(i), [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      if (!on_device(tensor) && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) call.host.insert(i);
      if (!on_device(tensor) || !writes(arguments[i])) return;
      own &= recording.own(tensor);
      if (tensor.numel() == 0 && call.value(i).isTensor()) empty.emplace_back(i, tensor);
    });
  }
  const auto returned = own ? std::nullopt : returned_arguments(call);
  if (!own && !returned) recording.refuse(name + ", which writes into memory from before and has results of its own");
  torch::jit::Stack given;
  if (returned) {
    for (const size_t i : *returned) given.push_back(call.value(i));
  }
  replace_arguments(call);
  Again again{op, kept_arguments(call), {}};
  if (returned) {  // not before the graph runs
    recording.add(name, call.uses, std::move(again));
    call.stack.resize(call.first);
    for (c10::IValue& result : given) call.stack.push_back(std::move(result));
    return;
  }
  std::vector<std::vector<int64_t>> shapes;
  for (const at::Tensor& tensor : call.written) shapes.push_back(tensor.sizes().vec());
  begin_operator(call.device, name, call.uses);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &call.stack);
  }
  std::vector<at::Tensor> fresh = replace_results(call, name);
  for (size_t i = 0; i < shapes.size(); ++i) {
    const bool resized = call.written[i].sizes() != at::IntArrayRef(shapes[i]);
    if (resized && c10::multiply_integers(shapes[i]) != 0) recording.refuse(name + ", which resizes");
  }
  for (const auto& [i, tensor] : empty) {
    if (tensor.numel() == 0) continue;
    again.arguments[i] = kernel_view(tensor);
    call.uses.push_back(use_of(tensor, Kind::Write));
  }
  if (fresh.empty() && call.written.empty()) return;  // a view
  for (const at::Tensor& tensor : fresh) call.uses.push_back(use_of(tensor, Kind::Write));
  for (const at::Tensor& result : tensors_in(call.stack, call.first)) {
    const auto same = [&](const at::Tensor& tensor) { return tensor.is_same(result); };
    const bool made = std::any_of(fresh.begin(), fresh.end(), same);
    again.results.push_back(made && result.numel() != 0 ? kernel_view(result) : at::Tensor());
  }
  recording.add(name, call.uses, std::move(again));
}

bool makes_views(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return !returns.empty() && std::all_of(returns.begin(), returns.end(), only_views);
}

// Which kernel a call runs: by the operator and its dtypes; those of products are chosen by sizes as well.
std::string kernel_of(Call& call) {
  const std::string& name = call.schema.name();
  std::string key = name + "." + call.schema.overload_name();
  const bool product = name.find("mm") != std::string::npos;
  for (size_t i = call.first; i < call.stack.size(); ++i) {
    each_tensor(call.stack[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      key += std::string(" ") + c10::toString(tensor.scalar_type());
      if (product) key += "[" + c10::Join(",", tensor.sizes()) + "]";
    });
  }
  return key;
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  Call call{schema, *stack, stack->size() - schema.arguments().size()};
  look(call);
  const c10::DeviceGuard guard(c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(call.device)));
  Stream& stream = current_stream(call.device);
  if (stream.recording != nullptr) return record(op, call, *stream.recording);
  if (holds_up_host(call)) count_wait(schema.name());
  if (!makes_views(schema)) load_kernel(call.device, kernel_of(call));
  if (!stream.idle()) {
    if (const auto returned = returned_arguments(call)) {
      count_launch(schema.name());
      return run_later(op, call, stream, *returned);
    }
  }
  replace_arguments(call);
  begin_operator(call.device, schema.name(), call.uses);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  const bool made = !replace_results(call, schema.name()).empty();
  if (made || !call.written.empty()) count_launch(schema.name());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

}  // namespace

}  // namespace emu
