// Memory that the ranks of a communicator share: places to put pieces of tensors in, and ways to wait for each other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace standin {

// Waits while `value` is `unwanted`; another process that changes it calls wake(). Gives up after the time-out.
void wait_while(const std::atomic<uint32_t>& value, uint32_t unwanted, const char* what);

void wake(std::atomic<uint32_t>& value);

// What a rank is about to do; all have to do the same.
struct Call {
  uint32_t kind;
  uint64_t bytes;
};

// A message's piece on its way from one rank to another.
struct Mailbox {
  static constexpr size_t kBytes = size_t{256} << 10;

  std::atomic<uint32_t> full;
  uint64_t bytes;
  char data[kBytes];
};

// One mapping of the memory. Fresh shared memory is zero, which is how everything in it begins.
class Shared {
 public:
  static constexpr size_t kSlotBytes = size_t{1} << 20;

  // Maps the memory called `name` and waits until all ranks have; then the name is gone again.
  Shared(const std::string& name, size_t rank, size_t nranks);
  ~Shared();
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  size_t rank() const { return rank_; }
  size_t nranks() const { return nranks_; }

  // Waits until all ranks have come here.
  void barrier(const char* what);

  // A place of kSlotBytes that rank `owner` writes and all read.
  char* slot(size_t owner) const;

  Call& call(size_t owner) const;

  Mailbox& mailbox(size_t from, size_t to) const;

 private:
  struct Barrier;

  const size_t rank_, nranks_, bytes_;
  char* base_;
};

}  // namespace standin
