// Streams and events. A stream is a queue in order with a worker thread, which runs what may take long: transfers
// between processes and waits for other streams, and after these operators that only write into memory that is there.
// Other operators run at once on the thread that calls them, after what their stream has queued; that they could also
// run later is what the checker stands for.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "checker.h"

namespace emu {

// Whether something that was queued has ended, and how.
class Mark {
 public:
  void set(std::exception_ptr error = nullptr);
  bool done() const;
  std::exception_ptr error() const;  // once done
  void wait();                       // rethrows
  bool wait_for(std::chrono::milliseconds time);

  std::chrono::steady_clock::time_point time;  // when it was set

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
};

class Recording;

class Stream {
 public:
  Stream(int device, c10::StreamId id);

  const int device;
  const c10::StreamId id;
  const int actor;
  Recording* recording = nullptr;  // of the graph that it captures

  void enqueue(std::function<void()> task);
  bool idle();
  // Until everything queued has run. Throws what a task threw, once.
  void drain();

  // Until then, or until the deadline; whether it has run.
  bool settle(std::chrono::steady_clock::time_point deadline);

  // Run on the worker, or at once where nothing is queued.
  void follow(const std::shared_ptr<Mark>& mark);  // wait for it
  void mark(const std::shared_ptr<Mark>& mark);    // set it

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false, started_ = false;
  std::exception_ptr error_;
};

struct Event {
  int device = -1;  // not recorded yet
  std::shared_ptr<Mark> mark;
  Clock clock;

  void record(Stream& stream);
  void block(Stream& stream) const;
  bool query() const;
  void synchronize() const;
};

int current_device();
void set_current_device(int device);
Stream& current_stream(int device);
Stream& stream_of(c10::Stream stream);
c10::Stream as_torch(const Stream& stream);
c10::Stream exchange_stream(c10::Stream stream);
Stream& new_stream(int device);
void synchronize_stream(Stream& stream);
void synchronize_device(int device);
// Until all streams of a device have done what is queued, whatever became of it; nothing is learnt of it.
void settle_device(int device);
// Until all streams have done what is queued, or until the deadline; whether they have.
bool settle_all(std::chrono::steady_clock::time_point deadline);

// How often the host was held up until the device had done what was queued, by what held it up.
void count_wait(const std::string& what);
std::map<std::string, int64_t> host_waits();

}  // namespace emu
