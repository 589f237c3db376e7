// The end of a process. Autograd runs a backward pass on one thread per device. That thread tells the caller that the
// pass is done and lets go of its graph only then; a graph whose last owner it is frees tensors that Python also knows,
// for which it takes the interpreter's lock. A thread that asks for this lock while the interpreter ends is unwound,
// and torch's destructors do not allow that: the process aborts. It shows where a process ends right after a backward.
#include "exit.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>
#include <thread>

#include "memory.h"
#include "streams.h"

namespace emu {

namespace {

// A pass of its own through every device's thread, which takes it only after it has let go of those before.
void pass_through_autograd() {
  for (int device = 0; device < kDevices; ++device) {
    const auto options = at::TensorOptions().device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
    const at::Tensor x = at::zeros({1}, options).requires_grad_();
    torch::autograd::grad({x.clone()}, {x}, {at::ones({1}, options)});
  }
}

}  // namespace

bool settle_before_exit(std::chrono::milliseconds time) {
  const auto deadline = std::chrono::steady_clock::now() + time;
  const auto done = std::make_shared<Mark>();
  std::thread([done] {  // a thread that a pass holds up for ever must not hold up the end as well
    try {
      pass_through_autograd();
    } catch (...) {  // a process that ends for an error of its device
    }
    done->set();
  }).detach();
  const bool passed = done->wait_for(time);
  return settle_all(deadline) && passed;
}

}  // namespace emu
