// Graphs: operators of one stream that are recorded and run again, on the same memory, by one launch.
#pragma once

#include <ATen/core/GraphImplInterface.h>
#include <ATen/core/Tensor.h>

#include <set>
#include <tuple>

#include "memory.h"
#include "streams.h"

namespace emu {

// What a stream records between the beginning and the end of a capture.
//
// To the program nothing of it runs until the graph does: memory from before the capture is not written, and what was
// allocated in it is undefined again at its end. (The kernels do run on memory of the capture, because only they know
// the shapes of their results.) What other devices do not record is refused, and so is the graph then: whatever holds
// up the host, events, messages that it sends, copies from and to it, and random numbers of a generator.
class Recording : public std::enable_shared_from_this<Recording> {
 public:
  Recording(int device, std::shared_ptr<Pool> pool);

  const std::shared_ptr<Pool>& pool() const { return pool_; }
  void allocated(Block& block);
  [[noreturn]] void refuse(const std::string& what);

  // Whether all of it was allocated in this capture.
  bool own(const at::Tensor& tensor) const;
  void add(const std::string& name, const std::vector<Use>& uses, std::function<void()> kernel);
  // A transfer between processes, which takes until others have come: the graph is never run on the host's thread then.
  void add_transfer(const std::string& name, const std::vector<Use>& uses, std::function<void()> transfer);
  void end();  // what was allocated in the capture is undefined from here on

  const std::string& refusal() const { return refusal_; }

  // Run it, on a stream. Throws where memory from before the capture was released, and races.
  void replay(Stream& stream);

 private:
  struct Touched {
    std::weak_ptr<char> life;  // of the block
    std::weak_ptr<const Extent> extent;
    Use use;
    bool own;
    std::string name;  // of the operator
  };

  const int device_;
  const uint64_t number_;
  std::shared_ptr<Pool> pool_;
  std::string refusal_;
  bool transfers_ = false;
  std::vector<std::function<void()>> kernels_;
  std::vector<Touched> touched_;
  std::set<std::tuple<uint64_t, Kind, size_t, size_t>> known_;  // of what was touched: block, and how
  std::vector<std::pair<char*, size_t>> memory_;                // allocated, by the kernels' address
};

// The recording of the current stream; null: it does not capture.
Recording* current_recording();

// Throws where the current stream captures.
void refuse_in_capture(const std::string& what);

// How many operators, copies and graphs the host launched so far, by name. Views are none.
void count_launch(const std::string& name);
std::map<std::string, int64_t> launches();

}  // namespace emu
