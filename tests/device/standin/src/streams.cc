#include "streams.h"

#include <set>
#include <thread>
#include <utility>
#include <vector>

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
  std::set<int> devices;  // that have their first stream
};

Streams& streams() {
  static auto* streams = new Streams;
  return *streams;
}

Event* event_of(C_Event event) { return reinterpret_cast<Event*>(event); }

C_Status create_stream(const C_Device device, C_Stream* stream) {
  Streams& known = streams();
  std::lock_guard<std::mutex> lock(known.mutex);
  const bool first = known.devices.insert(device == nullptr ? 0 : device->id).second;
  known.all.push_back(new Stream(first));
  *stream = reinterpret_cast<C_Stream>(known.all.back());
  return C_SUCCESS;
}

C_Status synchronize_stream(const C_Device, C_Stream stream) {
  stream_of(stream)->synchronize();
  return C_SUCCESS;
}

C_Status query_stream(const C_Device, C_Stream stream) { return stream_of(stream)->idle() ? C_SUCCESS : C_FAILED; }

C_Status synchronize_device(const C_Device) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    all = streams().all;
  }
  for (Stream* stream : all) stream->synchronize();
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
  if (mark != nullptr) mark->wait();
  return C_SUCCESS;
}

C_Status stream_wait_event(const C_Device, C_Stream stream, C_Event event) {
  const auto mark = event_of(event)->last();
  if (mark != nullptr) stream_of(stream)->run([mark] { mark->wait(); });
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
  interface->destroy_stream = synchronize_stream;
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
