#include "streams.h"

#include <c10/util/Exception.h>

#include <array>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "graphs.h"
#include "habits.h"
#include "memory.h"

namespace emu {

void Mark::set(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(mutex_);
  time = std::chrono::steady_clock::now();
  done_ = true;
  error_ = std::move(error);
  changed_.notify_all();
}

bool Mark::done() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

std::exception_ptr Mark::error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void Mark::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
  if (error_) std::rethrow_exception(error_);
}

bool Mark::wait_for(std::chrono::milliseconds time) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, time, [this] { return done_; });
}

Stream::Stream(int device, c10::StreamId id)
    : device(device),
      id(id),
      actor(Checker::get().add_actor(
          (id == 0 ? std::string("the default stream") : "stream " + std::to_string(id)) + " of emu:" +
          std::to_string(device))) {}

void Stream::enqueue(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  if (!started_) {
    started_ = true;
    std::thread([this] { work(); }).detach();  // streams live as long as the process
  }
  changed_.notify_all();
}

void Stream::work() {
  std::minstd_rand chance(static_cast<unsigned>(actor + 1));
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !tasks_.empty(); });
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    lock.unlock();
    std::exception_ptr error;
    if (habits().late_seconds > 0) {
      const std::chrono::duration<double> late(std::uniform_real_distribution<>(0, habits().late_seconds)(chance));
      std::this_thread::sleep_for(late);
    }
    try {
      task();
    } catch (...) {
      error = std::current_exception();
    }
    task = nullptr;
    lock.lock();
    if (error && !error_) error_ = error;
    busy_ = false;
    changed_.notify_all();
  }
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return tasks_.empty() && !busy_;
}

void Stream::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return tasks_.empty() && !busy_; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

bool Stream::settle(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return tasks_.empty() && !busy_; });
}

void Stream::follow(const std::shared_ptr<Mark>& mark) {
  if (!mark->done() || mark->error()) enqueue([mark] { mark->wait(); });
}

void Stream::mark(const std::shared_ptr<Mark>& mark) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (tasks_.empty() && !busy_) {
    mark->set(error_);
    return;
  }
  lock.unlock();
  enqueue([this, mark] {
    std::unique_lock<std::mutex> inner(mutex_);
    const std::exception_ptr error = error_;
    inner.unlock();
    mark->set(error);
  });
}

void Event::record(Stream& stream) {
  if (stream.recording != nullptr) stream.recording->refuse("an event");
  TORCH_CHECK(
      device == -1 || device == stream.device, "wrong device: an event of emu:", device, " cannot be recorded on emu:",
      stream.device);
  device = stream.device;
  mark = std::make_shared<Mark>();
  clock = Checker::get().record(stream.actor);
  stream.mark(mark);
}

void Event::block(Stream& stream) const {
  if (!mark) return;  // never recorded: as on other devices, there is nothing to wait for
  if (stream.recording != nullptr) stream.recording->refuse("a wait for an event");
  stream.follow(mark);
  Checker::get().wait(stream.actor, clock);
}

bool Event::query() const {
  refuse_in_capture("a look at an event");
  if (!mark) return true;
  if (!mark->done()) return false;
  Checker::get().host_wait(clock);
  return true;
}

void Event::synchronize() const {
  if (!mark) return;
  count_wait("Event.synchronize");
  mark->wait();
  Checker::get().host_wait(clock);
}

namespace {

constexpr size_t kPool = 64;  // further new streams are old ones again, as elsewhere

struct Streams {
  std::mutex mutex;
  std::array<std::vector<std::unique_ptr<Stream>>, kDevices> all;
  std::array<size_t, kDevices> next{};

  Streams() {
    for (int device = 0; device < kDevices; ++device) all[device].push_back(std::make_unique<Stream>(device, 0));
  }
};

Streams& streams() {
  static auto* made = new Streams;
  return *made;
}

thread_local int this_device = 0;
thread_local std::array<c10::StreamId, kDevices> this_stream{};

Stream& find(int device, c10::StreamId id) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  auto& all = streams().all[device];
  TORCH_CHECK(id >= 0 && static_cast<size_t>(id) < all.size(), "emu:", device, " has no stream ", id);
  return *all[id];
}

}  // namespace

int current_device() { return this_device; }

void set_current_device(int device) {
  TORCH_CHECK(
      device >= 0 && device < kDevices, "wrong device: this process has emu:0 to emu:", kDevices - 1, ", not emu:",
      device);
  this_device = device;
}

Stream& current_stream(int device) { return find(device, this_stream[device]); }

Stream& stream_of(c10::Stream stream) { return find(stream.device_index(), stream.id()); }

c10::Stream as_torch(const Stream& stream) {
  const c10::Device device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(stream.device));
  return c10::Stream(c10::Stream::UNSAFE, device, stream.id);
}

c10::Stream exchange_stream(c10::Stream stream) {
  const int device = stream.device_index();
  const c10::Stream before = as_torch(current_stream(device));
  this_stream[device] = stream_of(stream).id;
  return before;
}

Stream& new_stream(int device) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  auto& all = streams().all[device];
  if (all.size() <= kPool) {
    all.push_back(std::make_unique<Stream>(device, static_cast<c10::StreamId>(all.size())));
    return *all.back();
  }
  return *all[1 + streams().next[device]++ % kPool];
}

namespace {

std::mutex waits_mutex;
std::map<std::string, int64_t>& waits() {
  static auto* all = new std::map<std::string, int64_t>;
  return *all;
}

}  // namespace

void count_wait(const std::string& what) {
  refuse_in_capture("the host would wait for " + what);
  std::lock_guard<std::mutex> lock(waits_mutex);
  ++waits()[what];
}

std::map<std::string, int64_t> host_waits() {
  std::lock_guard<std::mutex> lock(waits_mutex);
  return waits();
}

bool settle_all(std::chrono::steady_clock::time_point deadline) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    for (auto& device : streams().all) {
      for (auto& stream : device) all.push_back(stream.get());
    }
  }
  bool settled = true;
  for (Stream* stream : all) settled = stream->settle(deadline) && settled;
  return settled;
}

void synchronize_stream(Stream& stream) {
  stream.drain();
  Checker::get().host_wait_actors({stream.actor});
}

void settle_device(int device) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    for (auto& stream : streams().all[device]) all.push_back(stream.get());
  }
  for (Stream* stream : all) {  // the longest that a time can be away overflows where it is counted in smaller units
    while (!stream->settle(std::chrono::steady_clock::now() + std::chrono::hours(1))) {
    }
  }
}

void synchronize_device(int device) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    for (auto& stream : streams().all[device]) all.push_back(stream.get());
  }
  std::vector<int> actors;
  for (Stream* stream : all) {
    stream->drain();
    actors.push_back(stream->actor);
  }
  Checker::get().host_wait_actors(actors);
}

}  // namespace emu
