// Bad habits of real devices, each asked for by name in HETERO_EMULATED_HABITS: `lazy-loading,slots=8`. Without any, the
// device does what it is told at once.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace emu {

struct Habits {
  bool lazy_loading = false;       // the first use of each kernel waits until the device is drained
  bool blocking_groups = false;    // a group's first collective, and a pair's first message, hold up the host until all come
  bool no_fp64 = false;            // no memory for double precision
  bool freeing_waits = false;      // a device without free memory gives up only after it is drained
  bool silent_abort = false;       // transfers that are aborted end as if nothing was wrong with them
  int slots = 0;                   // execution slots, which waiting receives occupy; 0: any number
  double late_seconds = 0;         // what is queued on a stream begins late, by any time up to this
  double compile_seconds = 0;      // what the first product of matrices takes on rank 0
  double connect_seconds = 0;      // how far apart the members' first calls may be; 0: the group's time-out
  int64_t communicator_bytes = 0;  // what each communicator takes on the device
};

// Of this process; throws on a habit that there is not.
const Habits& habits();

// Called before a kernel runs: waits where the device does, and has to. `key` says which kernel.
void load_kernel(int device, const std::string& key);

// Keys of the kernels that this process has used, in the order of their first use.
std::vector<std::string> loaded_kernels();

// Slots of the device that receives hold, and kernels need one of.
class Slots {
 public:
  static Slots& get();
  void take(int count);
  void give(int count);
  void await_one();  // until a kernel finds a slot

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int taken_ = 0;
};

}  // namespace emu
