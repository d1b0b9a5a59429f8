#include "streams.h"

#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "counts.h"
#include "settings.h"

namespace standin {
namespace {

// A point in a stream's work that others can wait for.
class Mark {
 public:
  void reach() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      reached_ = true;
    }
    changed_.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }

  // Returns whether it is reached in time.
  bool wait_for(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return reached_; });
  }

  bool reached() {
    std::lock_guard<std::mutex> lock(mutex_);
    return reached_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
};

// An event is the mark that was recorded last. Who waits for it waits for that mark, whatever is recorded later.
struct Event {
  std::mutex mutex;
  std::shared_ptr<Mark> mark;

  std::shared_ptr<Mark> last() {
    std::lock_guard<std::mutex> lock(mutex);
    return mark;
  }
};

// All streams ever made. A stream is never deleted: its thread may be at work while the process ends.
struct Streams {
  std::mutex mutex;
  std::vector<Stream*> all;
  std::set<int> devices;  // that have their compute stream
};

Streams& streams() {
  static auto* streams = new Streams;
  return *streams;
}

Event* event_of(C_Event event) { return reinterpret_cast<Event*>(event); }

// True where Paddle makes a device's context, whose stream is the compute stream. It need not be the first stream that
// is made, and nothing that Paddle hands over says which it is.
bool made_for_context() {
  void* callers[32];
  const int depth = backtrace(callers, 32);
  return std::any_of(callers, callers + depth, [](void* caller) {
    Dl_info found;
    return dladdr(caller, &found) != 0 && found.dli_sname != nullptr &&
           std::strstr(found.dli_sname, "DeviceContextPool") != nullptr;
  });
}

C_Status create_stream(const C_Device device, C_Stream* stream) {
  Streams& known = streams();
  std::lock_guard<std::mutex> lock(known.mutex);
  const int id = device == nullptr ? 0 : device->id;
  const bool computes = known.devices.count(id) == 0 && made_for_context();
  if (computes) known.devices.insert(id);
  known.all.push_back(new Stream(computes));
  *stream = reinterpret_cast<C_Stream>(known.all.back());
  return C_SUCCESS;
}

// Not a wait that a program asks for, so it does not count as one.
C_Status destroy_stream(const C_Device, C_Stream stream) {
  stream_of(stream)->synchronize();
  return C_SUCCESS;
}

C_Status synchronize_stream(const C_Device, C_Stream stream) {
  Stream* waited = stream_of(stream);
  wait_on_host(Wait::kStream, waited->idle(), [waited] { waited->synchronize(); });
  return C_SUCCESS;
}

C_Status query_stream(const C_Device, C_Stream stream) { return stream_of(stream)->idle() ? C_SUCCESS : C_FAILED; }

C_Status synchronize_device(const C_Device) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    all = streams().all;
  }
  const bool done = std::all_of(all.begin(), all.end(), [](Stream* stream) { return stream->idle(); });
  wait_on_host(Wait::kDevice, done, [&all] {
    for (Stream* stream : all) stream->synchronize();
  });
  return C_SUCCESS;
}

C_Status add_callback(const C_Device device, C_Stream stream, C_Callback callback, void* data) {
  stream_of(stream)->run([=] {
    C_Status status = C_SUCCESS;
    callback(device, stream, data, &status);
  });
  return C_SUCCESS;
}

C_Status create_event(const C_Device, C_Event* event) {
  *event = reinterpret_cast<C_Event>(new Event);
  return C_SUCCESS;
}

C_Status destroy_event(const C_Device, C_Event event) {
  delete event_of(event);
  return C_SUCCESS;
}

C_Status record_event(const C_Device, C_Stream stream, C_Event event) {
  auto mark = std::make_shared<Mark>();
  {
    std::lock_guard<std::mutex> lock(event_of(event)->mutex);
    event_of(event)->mark = mark;
  }
  stream_of(stream)->run([mark] { mark->reach(); });
  return C_SUCCESS;
}

C_Status query_event(const C_Device, C_Event event) {
  const auto mark = event_of(event)->last();
  return mark == nullptr || mark->reached() ? C_SUCCESS : C_FAILED;
}

C_Status synchronize_event(const C_Device, C_Event event) {
  const auto mark = event_of(event)->last();
  wait_on_host(Wait::kEvent, mark == nullptr || mark->reached(), [&mark] {
    if (mark != nullptr) mark->wait();
  });
  return C_SUCCESS;
}

C_Status stream_wait_event(const C_Device, C_Stream stream, C_Event event) {
  const auto mark = event_of(event)->last();
  if (mark == nullptr) return C_SUCCESS;
  if (stream_of(stream)->immediate()) {
    wait_on_host(Wait::kCompute, mark->reached(), [&mark] { mark->wait(); });
  } else {
    stream_of(stream)->run([mark] { mark->wait(); });
  }
  return C_SUCCESS;
}

}  // namespace

Stream::Stream(bool immediate) : immediate_(immediate) {
  if (!immediate_) std::thread([this] { serve(); }).detach();
}

void Stream::run(std::function<void()> work) {
  if (immediate_) {
    work();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void Stream::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_;
}

void Stream::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !queue_.empty(); });
    busy_ = true;
    {
      const auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
    }
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

Stream* stream_of(C_Stream stream) { return reinterpret_cast<Stream*>(stream); }

void fill_stream_interface(C_DeviceInterface* interface) {
  interface->create_stream = create_stream;
  interface->destroy_stream = destroy_stream;
  interface->query_stream = query_stream;
  interface->stream_add_callback = add_callback;
  interface->synchronize_stream = synchronize_stream;
  interface->synchronize_device = synchronize_device;
  interface->create_event = create_event;
  interface->destroy_event = destroy_event;
  interface->record_event = record_event;
  interface->query_event = query_event;
  interface->synchronize_event = synchronize_event;
  interface->stream_wait_event = stream_wait_event;
}

}  // namespace standin

// For Python: holds a stream back from here on until the gate that is returned is opened.
extern "C" void* standin_hold(void* stream) {
  auto* gate = new std::shared_ptr<standin::Mark>(std::make_shared<standin::Mark>());
  standin::stream_of(static_cast<C_Stream>(stream))->run([gate = *gate] {
    const double seconds = standin::settings().timeout_s;
    if (!gate->wait_for(seconds)) {
      standin::give_up("a stream was held back and not opened within " + std::to_string(seconds) + " s");
    }
  });
  return gate;
}

// A gate may be opened more than once.
extern "C" void standin_open(void* gate) { (*static_cast<std::shared_ptr<standin::Mark>*>(gate))->reach(); }
