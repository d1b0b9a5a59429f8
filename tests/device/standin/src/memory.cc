#include "memory.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>

#include "settings.h"
#include "streams.h"

namespace standin {
namespace {

constexpr size_t kAlignment = 512;
constexpr unsigned char kPoison = 0xFF;

struct Block {
  void* pointer;
  size_t bytes;
};

bool is_poison(const Block& block) {
  const auto* bytes = static_cast<const unsigned char*>(block.pointer);
  return std::all_of(bytes, bytes + block.bytes, [](unsigned char byte) { return byte == kPoison; });
}

// Counts what is live. What has been freed stays poisoned for a while: a stream that reads it late gets NaN, and one
// that writes it late is counted, where the process's own allocator would be corrupted or nothing would show.
class Accounts {
 public:
  void* allocate(size_t bytes) {
    const size_t padded = std::max((bytes + kAlignment - 1) / kAlignment, size_t{1}) * kAlignment;
    void* pointer = std::aligned_alloc(kAlignment, padded);
    if (pointer == nullptr) return nullptr;
    std::memset(pointer, kPoison, padded);
    std::lock_guard<std::mutex> lock(mutex_);
    live_[pointer] = padded;
    live_bytes_ += padded;
    peak_bytes_ = std::max(peak_bytes_, live_bytes_);
    return pointer;
  }

  bool free(void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = live_.find(pointer);
    if (found == live_.end()) return false;
    const Block block{pointer, found->second};
    live_.erase(found);
    live_bytes_ -= block.bytes;
    std::memset(pointer, kPoison, block.bytes);
    quarantine_.push_back(block);
    quarantine_bytes_ += block.bytes;
    while (quarantine_bytes_ > (settings().quarantine_mb << 20)) release_oldest();
    return true;
  }

  size_t live_bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    return live_bytes_;
  }

  size_t peak_bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    return peak_bytes_;
  }

  void forget_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_bytes_ = live_bytes_;
  }

  size_t writes_after_free() {
    std::lock_guard<std::mutex> lock(mutex_);
    while (!quarantine_.empty()) release_oldest();
    return spoilt_;
  }

 private:
  void release_oldest() {
    const Block block = quarantine_.front();
    quarantine_.pop_front();
    quarantine_bytes_ -= block.bytes;
    if (!is_poison(block)) ++spoilt_;
    std::free(block.pointer);
  }

  std::mutex mutex_;
  std::unordered_map<void*, size_t> live_;
  std::deque<Block> quarantine_;
  size_t live_bytes_ = 0, peak_bytes_ = 0, quarantine_bytes_ = 0, spoilt_ = 0;
};

Accounts& accounts() {
  static auto* accounts = new Accounts;  // never destroyed: Paddle frees memory while the process ends
  return *accounts;
}

C_Status allocate(const C_Device, void** pointer, size_t bytes) {
  *pointer = accounts().allocate(bytes);
  return *pointer == nullptr ? C_FAILED : C_SUCCESS;
}

C_Status deallocate(const C_Device, void* pointer, size_t) { return accounts().free(pointer) ? C_SUCCESS : C_ERROR; }

C_Status host_allocate(const C_Device, void** pointer, size_t bytes) {
  *pointer = std::malloc(bytes);
  return *pointer == nullptr ? C_FAILED : C_SUCCESS;
}

C_Status host_deallocate(const C_Device, void* pointer, size_t) {
  std::free(pointer);
  return C_SUCCESS;
}

C_Status set(const C_Device, void* pointer, unsigned char value, size_t bytes) {
  std::memset(pointer, value, bytes);
  return C_SUCCESS;
}

C_Status copy(const C_Device, void* to, const void* from, size_t bytes) {
  std::memmove(to, from, bytes);
  return C_SUCCESS;
}

C_Status copy_on_stream(const C_Device, C_Stream stream, void* to, const void* from, size_t bytes) {
  stream_of(stream)->run([=] { std::memmove(to, from, bytes); });
  return C_SUCCESS;
}

// From memory that may be gone when the copy's turn comes, as with a real device from memory that is not pinned.
C_Status copy_from_host(const C_Device, C_Stream stream, void* to, const void* from, size_t bytes) {
  const auto* first = static_cast<const char*>(from);
  stream_of(stream)->run([to, staged = std::string(first, first + bytes)] {
    std::memcpy(to, staged.data(), staged.size());
  });
  return C_SUCCESS;
}

C_Status copy_between(const C_Device, const C_Device, void* to, const void* from, size_t bytes) {
  return copy(nullptr, to, from, bytes);
}

C_Status statistics(const C_Device, size_t* total, size_t* free) {
  *total = kTotalBytes;
  *free = kTotalBytes - std::min(kTotalBytes, accounts().live_bytes());
  return C_SUCCESS;
}

C_Status min_chunk(const C_Device, size_t* bytes) {
  *bytes = kAlignment;
  return C_SUCCESS;
}

C_Status no_padding(const C_Device, size_t* bytes) {
  *bytes = 0;
  return C_SUCCESS;
}

}  // namespace

void fill_memory_interface(C_DeviceInterface* interface) {
  interface->device_memory_allocate = allocate;
  interface->device_memory_deallocate = deallocate;
  interface->host_memory_allocate = host_allocate;
  interface->host_memory_deallocate = host_deallocate;
  interface->device_memory_set = set;
  interface->memory_copy_h2d = copy;
  interface->memory_copy_d2h = copy;
  interface->memory_copy_d2d = copy;
  interface->memory_copy_p2p = copy_between;
  interface->async_memory_copy_h2d = copy_from_host;
  interface->async_memory_copy_d2h = copy_on_stream;
  interface->async_memory_copy_d2d = copy_on_stream;
  interface->device_memory_stats = statistics;
  interface->device_min_chunk_size = min_chunk;
  interface->device_extra_padding_size = no_padding;
}

}  // namespace standin

// For Python: bytes that Paddle has taken from the device and not given back; what its own allocator caches counts.
extern "C" size_t standin_live_bytes() { return standin::accounts().live_bytes(); }

extern "C" size_t standin_peak_bytes() { return standin::accounts().peak_bytes(); }

extern "C" void standin_forget_peak() { standin::accounts().forget_peak(); }

// Freed blocks that somebody has written to after they were freed. Lets all of them go.
extern "C" size_t standin_writes_after_free() { return standin::accounts().writes_after_free(); }
