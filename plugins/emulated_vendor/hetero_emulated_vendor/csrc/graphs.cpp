#include "graphs.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <atomic>
#include <cstring>

#include "kernels.h"

namespace emu {

namespace {

std::atomic<uint64_t> captures{0};

struct Pools {
  std::mutex mutex;
  std::map<uint64_t, std::weak_ptr<Pool>> all;
  uint64_t last = 0;
};

Pools& pools() {
  static auto* made = new Pools;
  return *made;
}

// The pool of other graphs, or a new one.
std::pair<uint64_t, std::shared_ptr<Pool>> pool_of(c10::MempoolId_t id, int device) {
  std::lock_guard<std::mutex> lock(pools().mutex);
  if (id.second != 0) {
    auto found = pools().all[id.second].lock();
    TORCH_CHECK(found != nullptr, "a pool of graphs that are gone");
    return {id.second, found};
  }
  auto made = std::make_shared<Pool>(device);
  pools().all[++pools().last] = made;
  return {pools().last, made};
}

}  // namespace

Recording::Recording(int device, std::shared_ptr<Pool> pool)
    : device_(device), number_(++captures), pool_(std::move(pool)) {}

void Recording::allocated(Block& block) {
  block.capture = number_;
  memory_.emplace_back(kernel_address(block, block.extent->address), block.extent->size);
}

void Recording::refuse(const std::string& what) {
  if (refusal_.empty()) refusal_ = what;
  TORCH_CHECK(false, "not in the capture of a graph: ", what);
}

bool Recording::own(const at::Tensor& tensor) const {
  const Block* block = block_of(tensor.storage().data_ptr());
  return block == nullptr || block->capture == number_;
}

void Recording::add(const std::string& name, const std::vector<Use>& uses, std::function<void()> kernel) {
  for (const Use& use : uses) {
    if (use.shadow == nullptr) continue;
    const Block& block = *use.shadow->block;
    if (!known_.emplace(block.number, use.kind, use.begin, use.end).second) continue;
    touched_.push_back({block.life, block.extent, use, block.capture == number_, name});
  }
  kernels_.push_back(std::move(kernel));
}

void Recording::add_transfer(
    const std::string& name, const std::vector<Use>& uses, std::function<void()> transfer) {
  transfers_ = true;
  add(name, uses, std::move(transfer));
}

void Recording::end() {
  for (const auto& [address, size] : memory_) std::memset(address, 0xFF, size);
  memory_.clear();
  known_.clear();
}

void Recording::replay(Stream& stream) {
  TORCH_CHECK(stream.device == device_, "wrong device: a graph of emu:", device_, " cannot run on emu:", stream.device);
  std::vector<Use> uses;
  std::vector<std::shared_ptr<const Extent>> kept;
  for (const Touched& touched : touched_) {
    const std::shared_ptr<char> alive = touched.life.lock();
    TORCH_CHECK(
        alive != nullptr || touched.own, "a graph runs on memory that was released: ", touched.name, " ",
        touched.use.kind == Kind::Read ? "reads" : "writes", " bytes ", touched.use.begin, " to ", touched.use.end,
        " of a storage from before its capture");
    if (alive == nullptr) continue;
    uses.push_back(touched.use);
    kept.push_back(touched.extent.lock());
  }
  const auto run = [self = shared_from_this(), kept = std::move(kept)] {
    at::AutoDispatchBelowADInplaceOrView below;
    for (const auto& kernel : self->kernels_) kernel();
  };
  if (transfers_ || !stream.idle()) {
    queue_operator(stream, "graph", uses, run);
    return;
  }
  begin_operator(device_, "graph", uses);
  run();
}

Recording* current_recording() { return current_stream(current_device()).recording; }

void refuse_in_capture(const std::string& what) {
  if (Recording* recording = current_recording()) recording->refuse(what);
}

namespace {

std::mutex launches_mutex;
std::map<std::string, int64_t>& all_launches() {
  static auto* all = new std::map<std::string, int64_t>;
  return *all;
}

// What ``torch.accelerator.Graph`` calls.
class Graph final : public at::GraphImplInterface {
 public:
  explicit Graph(const at::GraphImplArgs&) {}
  ~Graph() override {
    if (capturing_ != nullptr) capturing_->recording = nullptr;
  }

  void capture_begin(c10::MempoolId_t id, at::GraphCaptureMode) override {
    const int device = current_device();
    Stream& stream = current_stream(device);
    TORCH_CHECK(stream.id != 0, "the default stream of a device captures no graph");
    TORCH_CHECK(stream.recording == nullptr, "the stream captures another graph");
    TORCH_CHECK(recording_ == nullptr, "the graph has been captured");
    auto [number, pool] = pool_of(id, device);
    pool_ = {0, number};
    stream.drain();  // kernels run in a capture, on memory that a queued graph of the pool may use
    recording_ = std::make_shared<Recording>(device, std::move(pool));
    stream.recording = recording_.get();
    capturing_ = &stream;
  }

  void capture_end() override {
    TORCH_CHECK(capturing_ != nullptr, "no capture has begun");
    std::exchange(capturing_, nullptr)->recording = nullptr;
    recording_->end();
    if (recording_->refusal().empty()) return;
    const std::string refusal = recording_->refusal();
    recording_ = nullptr;
    TORCH_CHECK(false, "no graph was captured: ", refusal);
  }

  void instantiate() override {}

  void replay() override {
    TORCH_CHECK(recording_ != nullptr && capturing_ == nullptr, "there is no captured graph");
    refuse_in_capture("a graph");
    count_launch("graph");
    recording_->replay(current_stream(current_device()));
  }

  void reset() override {
    TORCH_CHECK(capturing_ == nullptr, "the capture has not ended");
    if (recording_ != nullptr) synchronize_device(current_device());  // it may still run
    recording_ = nullptr;
  }

  c10::MempoolId_t pool() const override { return pool_; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override { TORCH_CHECK(false, "graphs of the emulated device have no picture"); }

 private:
  std::shared_ptr<Recording> recording_;
  Stream* capturing_ = nullptr;
  c10::MempoolId_t pool_{0, 0};
};

}  // namespace

void count_launch(const std::string& name) {
  std::lock_guard<std::mutex> lock(launches_mutex);
  ++all_launches()[name];
}

std::map<std::string, int64_t> launches() {
  std::lock_guard<std::mutex> lock(launches_mutex);
  return all_launches();
}

}  // namespace emu

namespace at {
REGISTER_GRAPH_IMPL(EMU, emu::Graph)
}  // namespace at
