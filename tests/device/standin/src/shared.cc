#include "shared.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>

#include "settings.h"

namespace standin {
namespace {

constexpr size_t kPageBytes = 4096;

size_t round_up(size_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

size_t calls_bytes(size_t nranks) { return round_up(nranks * sizeof(Call)); }

size_t total_bytes(size_t nranks) {
  const size_t mailboxes = nranks * nranks * round_up(sizeof(Mailbox));
  return kPageBytes + calls_bytes(nranks) + nranks * Shared::kSlotBytes + mailboxes;
}

char* map(const std::string& name, size_t bytes) {
  const int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    give_up("shared memory " + name + ": " + std::strerror(errno));
  }
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (base == MAP_FAILED) give_up("mapping " + name + ": " + std::strerror(errno));
  return static_cast<char*>(base);
}

}  // namespace

struct Shared::Barrier {
  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> round;
};

void wait_while(const std::atomic<uint32_t>& value, uint32_t unwanted, const char* what) {
  const auto begin = std::chrono::steady_clock::now();
  const double timeout_s = settings().timeout_s;
  while (value.load() == unwanted) {
    const timespec nap{0, 100'000'000};  // looks again now and then, for the time-out
    syscall(SYS_futex, &value, FUTEX_WAIT, unwanted, &nap, nullptr, 0);
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    if (value.load() == unwanted && waited.count() > timeout_s) {
      give_up(std::string(what) + ": another rank has not come within " + std::to_string(timeout_s) + " s");
    }
  }
}

void wake(std::atomic<uint32_t>& value) { syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

Shared::Shared(const std::string& name, size_t rank, size_t nranks)
    : rank_(rank), nranks_(nranks), bytes_(total_bytes(nranks)), base_(map(name, bytes_)) {
  barrier("making a communicator");
  if (rank_ == 0) shm_unlink(name.c_str());
}

Shared::~Shared() { munmap(base_, bytes_); }

void Shared::barrier(const char* what) {
  auto& state = *reinterpret_cast<Barrier*>(base_);
  const uint32_t round = state.round.load();
  if (state.arrived.fetch_add(1) + 1 < nranks_) {
    wait_while(state.round, round, what);
    return;
  }
  state.arrived.store(0);
  state.round.fetch_add(1);
  wake(state.round);
}

char* Shared::slot(size_t owner) const { return base_ + kPageBytes + calls_bytes(nranks_) + owner * kSlotBytes; }

Call& Shared::call(size_t owner) const { return reinterpret_cast<Call*>(base_ + kPageBytes)[owner]; }

Mailbox& Shared::mailbox(size_t from, size_t to) const {
  return *reinterpret_cast<Mailbox*>(slot(nranks_) + (from * nranks_ + to) * round_up(sizeof(Mailbox)));
}

}  // namespace standin
