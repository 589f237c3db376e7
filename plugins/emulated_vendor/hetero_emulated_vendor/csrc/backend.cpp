#include "backend.h"

#include <c10/core/DeviceGuard.h>

#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "graphs.h"
#include "habits.h"

namespace emu {

namespace {

constexpr const char* kAborted = "emuccl: the communicator was aborted";
constexpr Milliseconds kLook{5};  // interval between two looks whether a member has come

}  // namespace

DeviceWork::DeviceWork(int rank, c10d::OpType type, Event end, Tensors outputs)
    : Work(rank, type), end_(std::move(end)), outputs_(std::move(outputs)) {}

bool DeviceWork::isCompleted() {
  if (!end_.mark->done()) return false;
  if (!end_.mark->error()) Checker::get().host_wait(end_.clock);
  return true;
}

bool DeviceWork::isSuccess() const { return end_.mark->done() && !end_.mark->error(); }

std::exception_ptr DeviceWork::exception() const { return end_.mark->done() ? end_.mark->error() : nullptr; }

bool DeviceWork::wait(Milliseconds timeout) {
  if (timeout != kNoTimeout) {
    count_wait("emuccl wait with a time-out");
    TORCH_CHECK(end_.mark->wait_for(timeout), "emuccl: no answer within ", timeout.count(), " ms");
  }
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
  end_.block(current_stream(end_.device));
  return true;
}

bool CapturedWork::isCompleted() {
  TORCH_CHECK(false, "emuccl: a transfer in the capture of a graph has no end that the host could ask for");
}

void DeviceWork::synchronize() { wait(kNoTimeout); }

void meet(c10d::Store& store, const std::string& vendor, int rank, int size, Milliseconds timeout) {
  const auto key = [](int member) { return "emuccl/vendor/" + std::to_string(member); };
  store.set(key(rank), std::vector<uint8_t>(vendor.begin(), vendor.end()));
  for (int peer = 0; peer < size; ++peer) {
    try {
      store.wait({key(peer)}, timeout);
    } catch (const std::exception&) {
      TORCH_CHECK(
          false, "emuccl: member ", peer, " of the group did not come within ", timeout.count(),
          " ms: it is not of the vendor ", vendor, ", or it is dead");
    }
    const std::vector<uint8_t> theirs = store.get(key(peer));
    const std::string name(theirs.begin(), theirs.end());
    TORCH_CHECK(
        name == vendor, "emuccl: member ", peer, " of the group is a foreign rank, of the vendor ", name, "; this is ",
        vendor);
  }
}

void Abort::run(std::function<void()> transfer, Milliseconds limit) {
  struct End {
    bool reached = false;
    std::exception_ptr error;
  };
  const auto end = std::make_shared<End>();
  const auto self = shared_from_this();
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::thread([self, end, transfer = std::move(transfer)]() mutable {
    std::exception_ptr error;
    try {
      transfer();
    } catch (...) {
      error = std::current_exception();
    }
    transfer = nullptr;  // memory is given back before anybody knows that it has ended
    std::lock_guard<std::mutex> lock(self->mutex_);
    end->reached = true;
    end->error = error;
    self->changed_.notify_all();
  }).detach();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return set_ || end->reached; });
  if (end->reached && !end->error) return;
  changed_.wait_until(lock, deadline, [&] { return set_; });
  if (!set_) std::rethrow_exception(end->error);
  // gloo, disconnected, ends what it does at once, but for a message of which a part is sent: that one never.
  changed_.wait_for(lock, std::chrono::seconds(1), [&] { return end->reached; });
  if (!habits().silent_abort) TORCH_CHECK(false, kAborted);
}

void Abort::set() {
  std::lock_guard<std::mutex> lock(mutex_);
  set_ = true;
  changed_.notify_all();
}

bool Abort::is_set() {
  std::lock_guard<std::mutex> lock(mutex_);
  return set_;
}

void Abort::check() { TORCH_CHECK(!is_set(), kAborted); }

DeviceBackend::DeviceBackend(
    c10::intrusive_ptr<c10d::Backend> inner, c10::intrusive_ptr<c10d::Store> store, int rank, int size,
    Milliseconds limit, int ctas, std::map<int, std::string> sockets)
    : Backend(rank, size),
      inner_(std::move(inner)),
      store_(std::move(store)),
      limit_(limit),
      ctas_(ctas),
      sockets_(std::move(sockets)) {}

void DeviceBackend::abort() {
  if (abort_->is_set()) return;
  abort_->set();
  for (const auto& [number, name] : sockets_) {  // unless they were closed, and the number is another file's now
    char found[64] = {};
    const std::string path = "/proc/self/fd/" + std::to_string(number);
    if (readlink(path.c_str(), found, sizeof(found) - 1) > 0 && name == found) ::shutdown(number, SHUT_RDWR);
  }
  // Who connects holds the lock, and gives up by itself.
  if (std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock); lock) communicators_.clear();
}

namespace {

std::atomic<int> made_communicators{0};

}  // namespace

int communicators() { return made_communicators; }

void DeviceBackend::connect(int peer) {
  if (communicators_.count(peer) != 0) return;
  const c10::DeviceGuard guard(c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device_)));
  communicators_[peer] = device_allocator()->allocate(habits().communicator_bytes);
  ++made_communicators;
  if (!habits().blocking_groups) return;
  std::vector<int> members{std::min(rank_, peer), std::max(rank_, peer)};
  if (peer == -1) {
    members.clear();
    for (int member = 0; member < size_; ++member) members.push_back(member);
  }
  const std::string pair = peer == -1 ? "" : std::to_string(members[0]) + "-" + std::to_string(members[1]) + "/";
  const auto key = [&](int member) { return "emuccl/connect/" + pair + std::to_string(member); };
  store_->set(key(rank_), std::vector<uint8_t>{1});
  const Milliseconds limit = habits().connect_seconds > 0
      ? Milliseconds(static_cast<int64_t>(1000 * habits().connect_seconds))
      : limit_;
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (const int member : members) {
    while (!store_->check({key(member)})) {
      abort_->check();
      TORCH_CHECK(
          std::chrono::steady_clock::now() < deadline, "emuccl: member ", member, " did not connect within ",
          limit.count(), " ms");
      std::this_thread::sleep_for(kLook);
    }
  }
}

void DeviceBackend::require(const Tensors& tensors, const char* name) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(
        on_device(tensor), "emuccl: ", name, " got a tensor on ", tensor.device(),
        "; it moves memory of the emulated device only");
    TORCH_CHECK(tensor.is_contiguous(), "emuccl: ", name, " takes contiguous tensors");
    if (device_ == -1) device_ = tensor.device().index();
    TORCH_CHECK(
        tensor.device().index() == device_, "emuccl: wrong device: ", name, " got a tensor on ", tensor.device(),
        ", the group is on emu:", device_);
  }
}

Stream& DeviceBackend::stream_for(int peer) {
  Stream*& stream = streams_[peer];
  if (stream == nullptr) stream = &new_stream(device_);
  return *stream;
}

DeviceBackend::Work DeviceBackend::start(
    c10d::OpType type, const std::string& name, int peer, const Tensors& reads, const Tensors& writes,
    Transfer transfer) {
  std::lock_guard<std::mutex> lock(mutex_);
  abort_->check();
  require(reads, name.c_str());
  require(writes, name.c_str());
  if (device_ == -1) device_ = current_device();
  Recording* recording = current_stream(device_).recording;
  if (recording != nullptr && communicators_.count(peer) == 0) recording->refuse("the first transfer, which connects");
  connect(peer);
  std::vector<Use> uses;
  std::vector<std::shared_ptr<const Extent>> kept;
  for (const auto& [tensors, kind] : {std::pair(&reads, Kind::Read), std::pair(&writes, Kind::Write)}) {
    for (const at::Tensor& tensor : *tensors) {
      const Use use = use_of(tensor, kind);
      if (use.shadow == nullptr) continue;
      uses.push_back(use);
      if (recording == nullptr) kept.push_back(extent_of(tensor.storage()));
    }
  }
  // A transfer that is aborted may still be in its thread, so that has all that it uses.
  const auto whole = [inner = inner_, transfer = std::move(transfer), kept = std::move(kept)]() mutable {
    transfer(*inner);
  };
  if (recording != nullptr) {  // a launch of the graph, on whose stream it then runs
    recording->add_transfer(
        "emuccl " + name, uses, [whole, abort = abort_, limit = limit_] { abort->run(whole, limit); });
    return c10::make_intrusive<CapturedWork>(rank_, type);
  }
  Stream& stream = stream_for(peer);
  ++started_;
  Event begin, end;
  begin.record(current_stream(device_));
  begin.block(stream);
  for (const Use& use : uses) Checker::get().record_stream(*use.shadow, stream.actor);
  Checker::get().run(stream.actor, "emuccl " + name, uses);
  auto failed = std::make_shared<std::exception_ptr>();
  const int slots = type == c10d::OpType::RECV ? ctas_ : 0;
  stream.enqueue([whole, failed, slots, abort = abort_, limit = limit_] {
    Slots::get().take(slots);
    try {
      abort->run(whole, limit);
    } catch (...) {
      *failed = std::current_exception();
    }
    Slots::get().give(slots);
  });
  end.device = device_;
  end.mark = std::make_shared<Mark>();
  end.clock = Checker::get().record(stream.actor);
  stream.enqueue([mark = end.mark, failed] { mark->set(*failed); });
  return c10::make_intrusive<DeviceWork>(rank_, type, std::move(end), writes);
}

namespace {

Tensors views_of(const Tensors& tensors) {
  Tensors views;
  for (const at::Tensor& tensor : tensors) views.push_back(kernel_view(tensor));
  return views;
}

}  // namespace

DeviceBackend::Work DeviceBackend::send(Tensors& tensors, int to, int) {
  return start(
      c10d::OpType::SEND, "send to member " + std::to_string(to), to, tensors, {},
      [views = views_of(tensors), to](c10d::Backend& inner) mutable { inner.send(views, to, 0)->wait(); });
}

DeviceBackend::Work DeviceBackend::recv(Tensors& tensors, int from, int) {
  return start(
      c10d::OpType::RECV, "receive from member " + std::to_string(from), from, {}, tensors,
      [views = views_of(tensors), from](c10d::Backend& inner) mutable { inner.recv(views, from, 0)->wait(); });
}

DeviceBackend::Work DeviceBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const bool source = rank_ == options.rootRank;
  return start(
      c10d::OpType::BROADCAST, "broadcast", -1, source ? tensors : Tensors{}, source ? Tensors{} : tensors,
      [views = views_of(tensors), options](c10d::Backend& inner) mutable { inner.broadcast(views, options)->wait(); });
}

DeviceBackend::Work DeviceBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return start(
      c10d::OpType::ALLREDUCE, "all-reduce", -1, {}, tensors,
      [views = views_of(tensors), options](c10d::Backend& inner) mutable { inner.allreduce(views, options)->wait(); });
}

DeviceBackend::Work DeviceBackend::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) {
  TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1, "emuccl: all-gather takes one input");
  return start(
      c10d::OpType::ALLGATHER, "all-gather", -1, inputs, outputs[0],
      [to = std::vector<Tensors>{views_of(outputs[0])}, from = views_of(inputs)](c10d::Backend& inner) mutable {
        inner.allgather(to, from)->wait();
      });
}

DeviceBackend::Work DeviceBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) {
  require({output, input}, "all-gather");
  return start(
      c10d::OpType::_ALLGATHER_BASE, "all-gather", -1, {input}, {output},
      [to = kernel_view(output), from = kernel_view(input)](c10d::Backend& inner) mutable {
        inner._allgather_base(to, from)->wait();
      });
}

DeviceBackend::Work DeviceBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  require({output, input}, "reduce-scatter");
  return start(
      c10d::OpType::_REDUCE_SCATTER_BASE, "reduce-scatter", -1, {input}, {output},
      [to = kernel_view(output), from = kernel_view(input), options](c10d::Backend& inner) mutable {
        inner._reduce_scatter_base(to, from, options)->wait();
      });
}

DeviceBackend::Work DeviceBackend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  require({output, input}, "all-to-all");
  return start(
      c10d::OpType::ALLTOALL_BASE, "all-to-all", -1, {input}, {output},
      [to = kernel_view(output), from = kernel_view(input), output_sizes, input_sizes,
       options](c10d::Backend& inner) mutable {
        inner.alltoall_base(to, from, output_sizes, input_sizes, options)->wait();
      });
}

DeviceBackend::Work DeviceBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) {
  TORCH_CHECK(
      static_cast<int>(outputs.size()) == size_ && static_cast<int>(inputs.size()) == size_,
      "emuccl: all-to-all takes one input and one output per member");
  require(outputs, "all-to-all");
  require(inputs, "all-to-all");
  return start(
      c10d::OpType::ALLTOALL, "all-to-all", -1, inputs, outputs,
      [to = views_of(outputs), from = views_of(inputs), rank = rank_, size = size_](c10d::Backend& inner) mutable {
        constexpr int kTag = 1;  // beside the messages of the pairs
        std::vector<Work> works;
        to[rank].copy_(from[rank]);
        for (int peer = 0; peer < size; ++peer) {
          Tensors in{to[peer]}, out{from[peer]};
          if (peer != rank && in[0].numel() != 0) works.push_back(inner.recv(in, peer, kTag));
          if (peer != rank && out[0].numel() != 0) works.push_back(inner.send(out, peer, kTag));
        }
        for (auto& work : works) work->wait();
      });
}

DeviceBackend::Work DeviceBackend::barrier(const c10d::BarrierOptions&) {
  Work work = start(
      c10d::OpType::BARRIER, "barrier", -1, {}, {}, [](c10d::Backend& inner) { inner.barrier()->wait(); });
  work->wait(kNoTimeout);
  count_wait("emuccl barrier");
  synchronize_stream(current_stream(device_));  // a barrier holds up the host
  return work;
}

}  // namespace emu
