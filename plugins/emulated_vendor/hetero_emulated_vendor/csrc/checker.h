// Happens-before checker: finds accesses to device memory that nothing orders.
//
// Every stream has a vector clock; the host has one, common to all threads, because locks and queues between threads
// are not seen here. An operator on a stream happens after everything its clock and the host's hold. Each storage
// keeps its last accesses by byte range; a conflicting access that does not happen after one of them is a race.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace emu {

using Clock = std::vector<uint64_t>;  // by actor, missing entries are 0

enum class Kind { Read, Write };

struct Access {
  Kind kind;
  int actor;
  uint64_t time;
  size_t begin, end;        // bytes of the storage
  const std::string* name;  // of the operator, interned
};

struct Block;

// What is known of one allocation.
struct Shadow {
  Block* block = nullptr;
  int device = 0;
  int owner = 0;  // actor on whose stream it was allocated
  size_t bytes = 0;
  std::vector<Access> accesses;
  std::vector<int> recorded;  // actors given by record_stream: the memory outlives their work
};

struct Use {
  Shadow* shadow;
  Kind kind;
  size_t begin, end;
};

// A moment of a stream: everything the stream did up to `time`.
struct Moment {
  int actor;
  uint64_t time;
};

class Checker {
 public:
  static Checker& get();

  // A new actor (a stream); `label` is how messages call it.
  int add_actor(std::string label);

  // An operator on a stream: all of its uses at once. Throws std::runtime_error that names both sides of a race.
  Moment run(int actor, const std::string& name, const std::vector<Use>& uses);

  // Memory was allocated on a stream: its bytes are undefined from here on.
  void allocated(Shadow& shadow);
  // Memory was given up by the host. A race is kept and raised by the next call, as destructors cannot throw.
  void freed(Shadow& shadow);
  void record_stream(Shadow& shadow, int actor);

  Clock record(int actor);                       // an event on a stream
  void wait(int actor, const Clock& event);      // the stream waits for it
  void host_wait(const Clock& event);            // the host does
  void host_wait_actors(const std::vector<int>& actors);

  // Runs when the host first knows that `moment` has passed.
  void when_host_knows(Moment moment, std::function<void()> then);
  bool host_knows(Moment moment);
  bool knows(int actor, Moment moment);

  // Races in what cannot throw. `raise_found` throws the first and forgets all.
  void found(std::string message);
  std::vector<std::string> take_found();
  void raise_found();

 private:
  void check(const Use& use, int actor, const Clock& now, const std::string& name) const;
  std::string describe(const Use& use, const std::string& name, int actor, const Access& earlier) const;
  Clock now(int actor) const;
  void run_known(std::unique_lock<std::recursive_mutex>& lock);

  struct Later {
    Moment moment;
    std::function<void()> then;
  };

  std::recursive_mutex mutex_;
  std::vector<Clock> clocks_;
  std::vector<std::string> labels_;
  Clock host_;
  std::vector<Later> later_;
  std::vector<std::string> found_;
};

const std::string* intern(const std::string& name);

}  // namespace emu
