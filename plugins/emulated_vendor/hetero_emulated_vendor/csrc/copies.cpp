#include "copies.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/equal.h>
#include <c10/core/DeviceGuard.h>

#include <limits>
#include <list>

#include "graphs.h"
#include "habits.h"
#include "kernels.h"

namespace emu {

namespace {

// A host buffer that an asynchronous copy still uses.
struct Busy {
  const char* begin;
  const char* end;
  Moment moment;
  bool written;         // by the copy
  at::Tensor buffer;    // on the host
  at::Tensor contents;  // what is delivered, or must still be there
  std::string name;
  bool over = false;
};

std::mutex busy_mutex;
std::list<std::shared_ptr<Busy>>& all_busy() {
  static auto* all = new std::list<std::shared_ptr<Busy>>;
  return *all;
}

std::pair<const char*, const char*> bytes_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * tensor.itemsize()};
}

// NaNs are equal here, whatever their bits.
bool same(const at::Tensor& a, const at::Tensor& b) {
  if (at::equal(a, b)) return true;
  return a.is_floating_point() && at::equal(a.isnan(), b.isnan()) && at::equal(a.nan_to_num(), b.nan_to_num());
}

void poison(const at::Tensor& buffer) {
  if (buffer.is_floating_point()) {
    buffer.fill_(std::numeric_limits<double>::quiet_NaN());
  } else if (buffer.scalar_type() == at::kBool) {
    buffer.logical_not_();
  } else {
    buffer.fill_(buffer.scalar_type() == at::kByte ? at::Scalar(255) : at::Scalar(-1));
  }
}

// The host, or a stream that knows the copy has passed, goes on with the buffer.
void end(Busy& busy) {
  {
    std::lock_guard<std::mutex> lock(busy_mutex);
    if (busy.over) return;
    busy.over = true;
    all_busy().remove_if([&](const auto& item) { return item.get() == &busy; });
  }
  at::AutoDispatchBelowADInplaceOrView below;
  if (busy.written) {
    busy.buffer.copy_(busy.contents);
  } else if (!same(busy.buffer, busy.contents)) {
    Checker::get().found(
        "race in pinned host memory: the host changed a buffer of " + std::to_string(busy.buffer.nbytes()) +
        " bytes while " + busy.name + " read it, without waiting for that copy");
  }
  busy.buffer.reset();
  busy.contents.reset();
}

std::vector<std::shared_ptr<Busy>> meeting(const at::Tensor& tensor) {
  const auto [begin, finish] = bytes_of(tensor);
  std::lock_guard<std::mutex> lock(busy_mutex);
  std::vector<std::shared_ptr<Busy>> found;
  for (const auto& busy : all_busy()) {
    if (busy->begin < finish && begin < busy->end) found.push_back(busy);
  }
  return found;
}

// A stream uses a host buffer next: earlier copies must have passed by then.
void use_host(const at::Tensor& tensor, Kind kind, const Stream& stream, const std::string& name) {
  for (const auto& busy : meeting(tensor)) {
    if (kind == Kind::Read && !busy->written) continue;
    if (!Checker::get().knows(stream.actor, busy->moment)) {
      throw std::runtime_error(
          "race in pinned host memory: " + name + (kind == Kind::Read ? " reads" : " writes") + " a buffer of " +
          std::to_string(tensor.nbytes()) + " bytes while " + busy->name + (busy->written ? " writes" : " reads") +
          " it, and nothing makes the later one wait for the earlier one");
    }
    end(*busy);
  }
}

void keep_busy(const at::Tensor& buffer, const at::Tensor& contents, bool written, Moment moment, std::string name) {
  const auto [begin, finish] = bytes_of(buffer);
  auto busy = std::make_shared<Busy>(Busy{begin, finish, moment, written, buffer, contents, std::move(name)});
  {
    std::lock_guard<std::mutex> lock(busy_mutex);
    all_busy().push_back(busy);
  }
  Checker::get().when_host_knows(moment, [busy] { end(*busy); });
}

std::string title(const char* kind, const Stream& stream, const at::Tensor& tensor) {
  return std::string(kind) + " of " + std::to_string(tensor.nbytes()) + " bytes on stream " +
         std::to_string(stream.id) + " of emu:" + std::to_string(stream.device);
}

void to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Stream& stream = current_stream(to.device().index());
  const bool watched = is_pinned(from.const_data_ptr());
  const std::string name = title("the copy to the device", stream, to);
  const Moment moment = begin_operator(stream.device, "copy to the device", {use_of(to, Kind::Write)});
  if (watched) use_host(from, Kind::Read, stream, name);
  kernel_view(to).copy_(from);
  if (!non_blocking || !watched) count_wait("copy to the device");  // pageable memory: read before the host goes on
  if (!non_blocking) {
    synchronize_stream(stream);
  } else if (watched) {
    keep_busy(from, from.clone(), false, moment, name);
  }
}

void to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Stream& stream = current_stream(from.device().index());
  const bool pinned = is_pinned(to.const_data_ptr());
  const std::string name = title("the copy to the host", stream, from);
  const Moment moment = begin_operator(stream.device, "copy to the host", {use_of(from, Kind::Read)});
  if (pinned) use_host(to, Kind::Write, stream, name);
  if (non_blocking && pinned) {
    const at::Tensor values = kernel_view(from).to(to.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    poison(to);
    keep_busy(to, values.expand(to.sizes()), true, moment, name);
  } else {
    to.copy_(kernel_view(from));
    count_wait("copy to the host");
    synchronize_stream(stream);
  }
}

void within_device(const at::Tensor& from, const at::Tensor& to) {
  const int source = from.device().index(), target = to.device().index();
  if (source != target) {  // both devices' streams wait for one another
    refuse_in_capture("a copy between devices");
    Event before, after;
    before.record(current_stream(target));
    before.block(current_stream(source));
    begin_operator(source, "copy between devices", {use_of(from, Kind::Read), use_of(to, Kind::Write)});
    kernel_view(to).copy_(kernel_view(from));
    after.record(current_stream(source));
    after.block(current_stream(target));
    return;
  }
  const std::vector<Use> uses{use_of(from, Kind::Read), use_of(to, Kind::Write)};
  Stream& stream = current_stream(source);
  const auto copy = [to = kernel_view(to), from = kernel_view(from), kept = std::pair(extent_of(to.storage()), extent_of(from.storage()))] {
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  };
  if (stream.recording != nullptr) {
    stream.recording->add("aten::copy_", uses, [to = kernel_view(to), from = kernel_view(from)] { to.copy_(from); });
    if (!stream.recording->own(to)) return;
  }
  load_kernel(source, std::string("aten::copy_ ") + c10::toString(from.scalar_type()) + c10::toString(to.scalar_type()));
  if (!stream.idle()) {
    queue_operator(stream, "aten::copy_", uses, copy);
    return;
  }
  begin_operator(source, "aten::copy_", uses);
  copy();
}

}  // namespace

void copy_tensor(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return;
  const c10::DeviceGuard guard(on_device(from) ? from.device() : to.device());
  if (!on_device(from) || !on_device(to)) refuse_in_capture("a copy between host and device");
  if (current_recording() == nullptr) count_launch("aten::copy_");
  if (!on_device(from)) {
    to_device(from, to, non_blocking);
  } else if (!on_device(to)) {
    to_host(from, to, non_blocking);
  } else {
    within_device(from, to);
  }
}

void check_host_read(const at::Tensor& tensor) {
  for (const auto& busy : meeting(tensor)) {
    if (busy->written) {
      throw std::runtime_error(
          "race in pinned host memory: the host reads a buffer of " + std::to_string(tensor.nbytes()) + " bytes that " +
          busy->name + " has not delivered: wait for its stream or an event after it");
    }
  }
}

}  // namespace emu
