#include "checker.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace emu {

namespace {

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

bool covers(const Clock& clock, int actor, uint64_t time) {
  return static_cast<size_t>(actor) < clock.size() && clock[actor] >= time;
}

bool conflict(Kind a, Kind b) { return a == Kind::Write || b == Kind::Write; }

// Keeps a storage's list short: what the new access covers, and follows, need not be looked at again.
void remember(std::vector<Access>& accesses, const Access& access, const Clock& host) {
  const auto replaced = [&](const Access& old) {
    const bool within = access.begin <= old.begin && old.end <= access.end;
    return within && (access.kind == Kind::Write || (old.kind == Kind::Read && old.actor == access.actor));
  };
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), replaced), accesses.end());
  if (accesses.size() >= 64) {  // what the host waited for happens before all that it starts from now on
    const auto passed = [&](const Access& old) { return covers(host, old.actor, old.time); };
    accesses.erase(std::remove_if(accesses.begin(), accesses.end(), passed), accesses.end());
  }
  accesses.push_back(access);
}

}  // namespace

const std::string* intern(const std::string& name) {
  static auto* mutex = new std::mutex;
  static auto* names = new std::set<std::string>;
  std::lock_guard<std::mutex> lock(*mutex);
  return &*names->insert(name).first;
}

Checker& Checker::get() {
  static auto* checker = new Checker;  // never destroyed: streams may end after static objects
  return *checker;
}

int Checker::add_actor(std::string label) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const int actor = static_cast<int>(clocks_.size());
  labels_.push_back(std::move(label));
  clocks_.emplace_back(actor + 1, 0);
  return actor;
}

Clock Checker::now(int actor) const {
  Clock clock = clocks_[actor];
  join(clock, host_);
  return clock;
}

std::string Checker::describe(const Use& use, const std::string& name, int actor, const Access& earlier) const {
  const auto verb = [](Kind kind) { return kind == Kind::Read ? "reads" : "writes"; };
  std::ostringstream text;
  text << "race on emu:" << use.shadow->device << ": " << name << " on " << labels_[actor] << " " << verb(use.kind)
       << " bytes " << use.begin << " to " << use.end << " of a storage of " << use.shadow->bytes << " bytes, which "
       << *earlier.name << " on " << labels_[earlier.actor] << " " << verb(earlier.kind) << " (bytes "
       << earlier.begin << " to " << earlier.end << "), and nothing makes the later one wait for the earlier one";
  return text.str();
}

void Checker::check(const Use& use, int actor, const Clock& now, const std::string& name) const {
  for (const Access& old : use.shadow->accesses) {
    const bool meet = old.begin < use.end && use.begin < old.end;
    if (!meet || old.actor == actor || !conflict(old.kind, use.kind) || covers(now, old.actor, old.time)) continue;
    throw std::runtime_error(describe(use, name, actor, old));
  }
}

Moment Checker::run(int actor, const std::string& name, const std::vector<Use>& uses) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  raise_found();
  Clock clock = now(actor);
  for (const Use& use : uses) check(use, actor, clock, name);
  const uint64_t time = ++clock[actor];
  const std::string* kept = intern(name);
  for (const Use& use : uses) {
    remember(use.shadow->accesses, {use.kind, actor, time, use.begin, use.end, kept}, host_);
  }
  clocks_[actor] = std::move(clock);
  return {actor, time};
}

void Checker::allocated(Shadow& shadow) {
  static const std::string* name = intern("allocation");
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  Clock clock = now(shadow.owner);
  const uint64_t time = ++clock[shadow.owner];
  clocks_[shadow.owner] = std::move(clock);
  shadow.accesses.assign(1, {Kind::Write, shadow.owner, time, 0, shadow.bytes, name});
  shadow.recorded.clear();
}

void Checker::freed(Shadow& shadow) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  Clock clock = now(shadow.owner);
  for (int actor : shadow.recorded) join(clock, clocks_[actor]);
  const Use whole{&shadow, Kind::Write, 0, shadow.bytes};
  for (const Access& old : shadow.accesses) {
    if (old.actor == shadow.owner || covers(clock, old.actor, old.time)) continue;
    found(describe(whole, "the release of the memory", shadow.owner, old) + " (record_stream would)");
    break;
  }
  shadow.accesses.clear();
}

void Checker::record_stream(Shadow& shadow, int actor) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (std::find(shadow.recorded.begin(), shadow.recorded.end(), actor) == shadow.recorded.end()) {
    shadow.recorded.push_back(actor);
  }
}

Clock Checker::record(int actor) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return now(actor);
}

void Checker::wait(int actor, const Clock& event) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  join(clocks_[actor], event);
}

void Checker::host_wait(const Clock& event) {
  std::unique_lock<std::recursive_mutex> lock(mutex_);
  join(host_, event);
  run_known(lock);
  raise_found();
}

void Checker::host_wait_actors(const std::vector<int>& actors) {
  std::unique_lock<std::recursive_mutex> lock(mutex_);
  for (int actor : actors) join(host_, clocks_[actor]);
  run_known(lock);
  raise_found();
}

void Checker::when_host_knows(Moment moment, std::function<void()> then) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  later_.push_back({moment, std::move(then)});
}

void Checker::run_known(std::unique_lock<std::recursive_mutex>& lock) {
  std::vector<std::function<void()>> due;
  for (auto it = later_.begin(); it != later_.end();) {
    if (covers(host_, it->moment.actor, it->moment.time)) {
      due.push_back(std::move(it->then));
      it = later_.erase(it);
    } else {
      ++it;
    }
  }
  lock.unlock();  // they touch tensors, whose release may need Python's lock
  for (auto& then : due) then();
  due.clear();
  lock.lock();
}

bool Checker::host_knows(Moment moment) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return covers(host_, moment.actor, moment.time);
}

bool Checker::knows(int actor, Moment moment) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return covers(now(actor), moment.actor, moment.time);
}

void Checker::found(std::string message) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::fprintf(stderr, "%s\n", message.c_str());
  found_.push_back(std::move(message));
}

std::vector<std::string> Checker::take_found() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return std::exchange(found_, {});
}

void Checker::raise_found() {
  std::vector<std::string> messages = take_found();
  if (!messages.empty()) throw std::runtime_error(messages.front());
}

}  // namespace emu
