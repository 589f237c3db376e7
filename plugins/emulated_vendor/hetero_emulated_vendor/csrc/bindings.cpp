#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>

#include "backend.h"
#include "copies.h"
#include "exit.h"
#include "graphs.h"
#include "guard.h"
#include "habits.h"

namespace py = pybind11;
using Unlocked = py::call_guard<py::gil_scoped_release>;  // workers must never wait for a host that waits for them

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace emu;
  module.def("register_device", &register_device);
  module.def("device_count", [] { return kDevices; });
  module.def("current_device", &current_device);
  module.def("set_device", &set_current_device);
  module.def("current_stream", [](int device) { return current_stream(device).id; });
  module.def("set_stream", [](int device, int64_t id) {
    const c10::Device where(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
    set_current_device(device);
    exchange_stream(c10::Stream(c10::Stream::UNSAFE, where, id));
  });
  module.def(
      "synchronize",
      [](int device) {
        count_wait("synchronize");
        synchronize_device(device);
      },
      Unlocked());
  module.def("settle_before_exit", &settle_before_exit, Unlocked());
  module.def("host_waits", &host_waits);
  module.def("launches", &launches);
  module.def("total_memory", &total_memory);
  module.def("memory", [](int device) {
    const auto stats = device_allocator()->getDeviceStats(static_cast<c10::DeviceIndex>(device));
    return std::pair(stats.allocated_bytes[0].current, stats.allocated_bytes[0].peak);
  });
  module.def("reset_peak_memory", [](int device) {
    device_allocator()->resetPeakStats(static_cast<c10::DeviceIndex>(device));
  });
  module.def("default_generator", &default_generator);
  module.def("check_host_read", &check_host_read);
  module.def("findings", [] { return Checker::get().take_found(); });
  py::class_<DeviceBackend, c10d::Backend, c10::intrusive_ptr<DeviceBackend>>(module, "DeviceBackend")
      .def(py::init([](const c10::intrusive_ptr<c10d::Backend>& inner, const c10::intrusive_ptr<c10d::Store>& store,
                       int rank, int size, std::chrono::milliseconds limit, int ctas,
                       std::map<int, std::string> sockets) {
        return c10::make_intrusive<DeviceBackend>(inner, store, rank, size, limit, ctas, std::move(sockets));
      }));
  module.def("communicators", &communicators);
  module.def("loaded_kernels", &loaded_kernels);
  module.def("check_habits", [] { habits(); });
  module.def(
      "meet",
      [](const c10::intrusive_ptr<c10d::Store>& store, const std::string& vendor, int rank, int size,
         std::chrono::milliseconds timeout) { meet(*store, vendor, rank, size, timeout); },
      Unlocked());
}
