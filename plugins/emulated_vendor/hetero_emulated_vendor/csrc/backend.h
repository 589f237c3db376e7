// The process-group backend of the emulated device.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "kernels.h"

namespace emu {

using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;

// A transfer on a stream of its own. As NCCL's, `wait` holds up the current stream, not the host.
class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(int rank, c10d::OpType type, Event end, Tensors outputs);
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(Milliseconds timeout) override;
  void synchronize() override;
  Tensors result() override { return outputs_; }

 private:
  Event end_;
  Tensors outputs_;
};

// A transfer that a graph holds: what is captured after it comes after it.
class CapturedWork final : public c10d::Work {
 public:
  CapturedWork(int rank, c10d::OpType type) : Work(rank, type) {}
  bool isCompleted() override;
  bool wait(Milliseconds) override { return true; }
  void synchronize() override {}
};

// Returns once all members of a group have said whose they are. Throws if one is not of `vendor`, or does not come.
void meet(c10d::Store& store, const std::string& vendor, int rank, int size, Milliseconds timeout);

// What a group's waiting transfers and its abort have in common.
class Abort : public std::enable_shared_from_this<Abort> {
 public:
  // Run a transfer of the group, in a thread of its own, whose end the caller waits for: for ever where the peer is gone,
  // but for `limit` from now, or the abort. Throws what the transfer threw, or that it was aborted.
  void run(std::function<void()> transfer, Milliseconds limit);
  void set();
  bool is_set();
  void check();  // throws where it is set

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

// Moves device memory between processes of one host: refuses host tensors, and tensors of another device than its first.
// Transfers of a pair of ranks queue up in the order of their start, whatever their tags, as do the collectives of the
// group. As NCCL's, they do not notice that a peer is gone: they occupy their stream until `abort`.
class DeviceBackend final : public c10d::Backend {
 public:
  // `inner` moves what the kernels see, in host memory.
  // `store` is the group's, `limit` how long members may wait for each other, `ctas` how many execution slots a message
  // takes, and `sockets` the connections of `inner`, by file descriptor as /proc names them.
  DeviceBackend(
      c10::intrusive_ptr<c10d::Backend> inner, c10::intrusive_ptr<c10d::Store> store, int rank, int size,
      Milliseconds limit, int ctas, std::map<int, std::string> sockets);

  // End all transfers and give back the communicators; from any thread. What was not received yet never comes.
  void abort() override;

  using Work = c10::intrusive_ptr<c10d::Work>;

  const std::string getBackendName() const override { return "emuccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return started_; }

  Work send(Tensors& tensors, int to, int tag) override;
  Work recv(Tensors& tensors, int from, int tag) override;
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Work _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  Work alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override;
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Work barrier(const c10d::BarrierOptions& options) override;

 private:
  using Transfer = std::function<void(c10d::Backend&)>;

  void require(const Tensors& tensors, const char* name);
  // Queue a transfer on the stream of `peer` (-1: of the collectives), after the current stream.
  Work start(
      c10d::OpType type, const std::string& name, int peer, const Tensors& reads, const Tensors& writes,
      Transfer transfer);
  Stream& stream_for(int peer);
  // Make the communicator of a pair (`peer` -1: of the group), unless there is one.
  void connect(int peer);

  c10::intrusive_ptr<c10d::Backend> inner_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const Milliseconds limit_;
  const int ctas_;
  const std::map<int, std::string> sockets_;
  const std::shared_ptr<Abort> abort_ = std::make_shared<Abort>();
  std::mutex mutex_;
  std::map<int, Stream*> streams_;
  std::map<int, c10::DataPtr> communicators_;  // by peer, the device memory of each
  int device_ = -1;  // of the first tensor
  uint64_t started_ = 0;
};

// Communicators that this process has made so far.
int communicators();

}  // namespace emu
