// Streams and events. The stream of a device's context, the compute stream, works in the calling thread: Paddle's
// kernels for the CPU run there as well, so that work and kernels keep one order. Every other stream is a thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "paddle/phi/backends/device_ext.h"

namespace standin {

class Stream {
 public:
  // `immediate`: work is done by whoever submits it.
  explicit Stream(bool immediate);

  // Does `work` after everything submitted before.
  void run(std::function<void()> work);

  // Waits until all that has been submitted is done.
  void synchronize();

  bool idle();

  bool immediate() const { return immediate_; }

 private:
  void serve();

  const bool immediate_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false;
};

Stream* stream_of(C_Stream stream);

void fill_stream_interface(C_DeviceInterface* interface);

}  // namespace standin
