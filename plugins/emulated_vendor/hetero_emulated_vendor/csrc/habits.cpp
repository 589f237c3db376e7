#include "habits.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <sstream>
#include <thread>

#include "streams.h"

namespace emu {

namespace {

Habits read_habits() {
  Habits found;
  const std::map<std::string, std::function<void(double)>> known{
      {"lazy-loading", [&](double) { found.lazy_loading = true; }},
      {"blocking-groups", [&](double) { found.blocking_groups = true; }},
      {"no-fp64", [&](double) { found.no_fp64 = true; }},
      {"freeing-waits", [&](double) { found.freeing_waits = true; }},
      {"silent-abort", [&](double) { found.silent_abort = true; }},
      {"slots", [&](double value) { found.slots = static_cast<int>(value); }},
      {"late", [&](double value) { found.late_seconds = value; }},
      {"compile", [&](double value) { found.compile_seconds = value; }},
      {"connect", [&](double value) { found.connect_seconds = value; }},
      {"communicator-mib", [&](double value) { found.communicator_bytes = static_cast<int64_t>(value) << 20; }},
  };
  const char* text = std::getenv("HETERO_EMULATED_HABITS");
  std::istringstream words(text != nullptr ? text : "");
  for (std::string word; std::getline(words, word, ',');) {
    if (word.empty()) continue;
    const size_t equals = word.find('=');
    const auto habit = known.find(word.substr(0, equals));
    if (habit == known.end()) {
      std::string names;
      for (const auto& [name, _] : known) names += " " + name;
      TORCH_CHECK(false, "HETERO_EMULATED_HABITS: there is no habit ", word, "; there are:", names);
    }
    habit->second(equals == std::string::npos ? 0 : std::atof(word.c_str() + equals + 1));
  }
  return found;
}

}  // namespace

const Habits& habits() {
  static const Habits found = read_habits();
  return found;
}

namespace {

struct Loaded {
  std::mutex mutex;
  std::set<std::pair<int, std::string>> seen;
  std::vector<std::string> in_order;
};

Loaded& loaded() {
  static auto* found = new Loaded;
  return *found;
}

}  // namespace

std::vector<std::string> loaded_kernels() {
  std::lock_guard<std::mutex> lock(loaded().mutex);
  return loaded().in_order;
}

void load_kernel(int device, const std::string& key) {
  {
    std::lock_guard<std::mutex> lock(loaded().mutex);
    if (!loaded().seen.emplace(device, key).second) return;
    loaded().in_order.push_back(key);
  }
  if (habits().compile_seconds > 0 && key.rfind("aten::mm", 0) == 0) {
    static std::once_flag compiled;
    const char* rank = std::getenv("RANK");
    if (rank != nullptr && std::string(rank) == "0") {
      std::call_once(compiled, [] { std::this_thread::sleep_for(std::chrono::duration<double>(habits().compile_seconds)); });
    }
  }
  if (!habits().lazy_loading) return;
  const char* loading = std::getenv("HETERO_EMULATED_LOADING");
  if (loading == nullptr || std::string(loading) != "EAGER") settle_device(device);
}

Slots& Slots::get() {
  static auto* slots = new Slots;
  return *slots;
}

void Slots::take(int count) {
  std::lock_guard<std::mutex> lock(mutex_);
  taken_ += count;
}

void Slots::give(int count) {
  std::lock_guard<std::mutex> lock(mutex_);
  taken_ -= count;
  changed_.notify_all();
}

void Slots::await_one() {
  if (habits().slots == 0) return;
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return taken_ < habits().slots; });
}

}  // namespace emu
