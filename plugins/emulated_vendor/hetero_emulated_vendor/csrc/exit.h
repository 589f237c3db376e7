#pragma once

#include <chrono>

namespace emu {

// Before the process ends, so that no thread finds the interpreter or torch's global objects gone: until autograd's
// threads of all devices have let go of the backward passes that they ran, and streams have done what is queued. False
// where something (a transfer that nobody answers) does not end in time.
bool settle_before_exit(std::chrono::milliseconds time);

}  // namespace emu
