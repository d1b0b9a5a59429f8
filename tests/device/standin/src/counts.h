// What has happened in this process so far, for tests that ask: how far collectives are, and when the host waited.
#pragma once

#include <functional>
#include <string>

namespace standin {

// How far a collective is: put on its stream; its turn has come; over.
enum class Stage : size_t { kIssued, kBegun, kFinished };

constexpr size_t kStages = 3;

void count_collective(const std::string& kind, Stage stage);

// Why the host waits. The first three are what a program asks for, and what it would wait for on any device. The others
// are owed to the stand-in, whose compute stream and most of whose kernels work in the calling thread.
enum class Wait : size_t {
  kStream,   // until a stream has done everything
  kEvent,    // until an event is reached
  kDevice,   // until all streams have done everything
  kCompute,  // the compute stream was told to wait, or to carry out a collective
  kKernel,   // a kernel that another stream cannot put off waits for what that stream was told before
};

constexpr size_t kWaits = 5;

// Waits, and counts it: as a call, and where it is not `done` already also as a block, with the time it took.
void wait_on_host(Wait why, bool done, const std::function<void()>& wait);

}  // namespace standin
