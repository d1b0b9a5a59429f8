#include "counts.h"

#include <dlfcn.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <unordered_map>

namespace standin {
namespace {

struct Waited {
  size_t calls = 0, blocked = 0;
  double ms = 0.0;
};

struct Counts {
  std::mutex mutex;
  std::unordered_map<std::string, std::array<size_t, kStages>> collectives;
  std::array<Waited, kWaits> waits;
};

// Never destroyed: threads of streams may still count while the process ends.
Counts& counts() {
  static auto* counts = new Counts;
  return *counts;
}

void count_wait(Wait why, bool blocked, double ms) {
  std::lock_guard<std::mutex> lock(counts().mutex);
  Waited& waited = counts().waits.at(static_cast<size_t>(why));
  ++waited.calls;
  waited.blocked += blocked ? 1 : 0;
  waited.ms += ms;
}

// A device's own compute stream would wait by itself while the host goes on. This one holds the thread up; other threads
// of Python must go on all the same, so the interpreter is let go of, if this thread has it.
void while_others_run(const std::function<void()>& wait) {
  static const auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  static const auto release = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
  static const auto take = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
  if (check == nullptr || release == nullptr || take == nullptr || check() == 0) {
    wait();
    return;
  }
  void* const state = release();
  wait();
  take(state);
}

}  // namespace

void count_collective(const std::string& kind, Stage stage) {
  std::lock_guard<std::mutex> lock(counts().mutex);
  ++counts().collectives[kind].at(static_cast<size_t>(stage));
}

void wait_on_host(Wait why, bool done, const std::function<void()>& wait) {
  const auto begin = std::chrono::steady_clock::now();
  if (why == Wait::kCompute && !done) {
    while_others_run(wait);
  } else {
    wait();
  }
  const std::chrono::duration<double, std::milli> passed = std::chrono::steady_clock::now() - begin;
  count_wait(why, !done, done ? 0.0 : passed.count());
}

}  // namespace standin

// For Python: how many collectives of this kind have come to this stage on this rank.
extern "C" size_t standin_collectives(const char* kind, size_t stage) {
  standin::Counts& counts = standin::counts();
  std::lock_guard<std::mutex> lock(counts.mutex);
  return counts.collectives[kind].at(stage);
}

// The waits of one kind: writes their milliseconds and how many blocked, returns how many there were.
extern "C" size_t standin_host_waits(size_t why, size_t* blocked, double* ms) {
  standin::Counts& counts = standin::counts();
  std::lock_guard<std::mutex> lock(counts.mutex);
  const standin::Waited& waited = counts.waits.at(why);
  *blocked = waited.blocked;
  *ms = waited.ms;
  return waited.calls;
}
