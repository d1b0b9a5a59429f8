#include "collectives.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "settings.h"

namespace standin {
namespace {

// The same in every run where a rank makes its communicators in the same order.
uint64_t next_seed(size_t rank) {
  static std::atomic<uint64_t> made{0};
  return (settings().seed * 1009 + made.fetch_add(1)) * 1009 + rank;
}

std::string describe(const Call& call) {
  return std::string(name_of(static_cast<Kind>(call.kind))) + " of " + std::to_string(call.bytes) + " bytes";
}

// What of `whole` lies from `offset` on, at most `bytes` of it.
size_t left(const Elements& whole, size_t offset, size_t bytes) {
  return std::min(bytes, whole.bytes() - std::min(whole.bytes(), offset));
}

char* at(const Elements& whole, size_t offset) { return static_cast<char*>(whole.pointer) + offset; }

}  // namespace

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kAllGather:
      return "all_gather";
    case Kind::kReduceScatter:
      return "reduce_scatter";
    case Kind::kAllReduce:
      return "all_reduce";
    case Kind::kReduce:
      return "reduce";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kAllToAll:
      return "all_to_all";
    case Kind::kSend:
      return "send";
    case Kind::kReceive:
      return "receive";
  }
  return "unknown";
}

Communicator::Communicator(const std::string& name, size_t rank, size_t nranks)
    : shared_(name, rank, nranks), random_(next_seed(rank)) {}

void Communicator::be_late(const char* kind) {
  const Settings now = settings();
  if (now.slows(kind)) sleep_ms(std::uniform_real_distribution<double>(0.0, now.jitter_ms)(random_));
}

void Communicator::begin(Kind kind, size_t bytes, double wire_bytes) {
  const char* name = name_of(kind);
  be_late(name);
  shared_.call(shared_.rank()) = Call{static_cast<uint32_t>(kind), bytes};
  shared_.barrier(name);
  const Call own = shared_.call(shared_.rank());
  for (size_t rank = 0; rank < shared_.nranks(); ++rank) {
    const Call other = shared_.call(rank);
    if (other.kind == own.kind && other.bytes == own.bytes) continue;
    give_up("rank " + std::to_string(shared_.rank()) + " is in " + describe(own) + ", rank " + std::to_string(rank) +
            " in " + describe(other));
  }
  const Settings now = settings();
  if (now.slows(name)) sleep_ms(now.duration_ms(wire_bytes));
  shared_.barrier(name);
}

void Communicator::all_gather(Elements from, void* to) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t total = from.bytes(), nranks = shared_.nranks();
  begin(Kind::kAllGather, total, static_cast<double>(total) * static_cast<double>(nranks - 1));
  for (size_t offset = 0; offset < total; offset += Shared::kSlotBytes) {
    const size_t bytes = std::min(Shared::kSlotBytes, total - offset);
    std::memcpy(shared_.slot(shared_.rank()), static_cast<char*>(from.pointer) + offset, bytes);
    shared_.barrier("all_gather");
    for (size_t rank = 0; rank < nranks; ++rank) {
      std::memcpy(static_cast<char*>(to) + rank * total + offset, shared_.slot(rank), bytes);
    }
    shared_.barrier("all_gather");
  }
}

void Communicator::reduce_scatter(const void* from, Elements to, C_CCLReduceOp op) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t total = to.bytes(), nranks = shared_.nranks(), element = element_bytes(to.type);
  begin(Kind::kReduceScatter, total, static_cast<double>(total) * static_cast<double>(nranks - 1));
  const size_t step = Shared::kSlotBytes / nranks / element * element;
  for (size_t offset = 0; offset < total; offset += step) {
    const size_t bytes = std::min(step, total - offset);
    for (size_t rank = 0; rank < nranks; ++rank) {
      const char* part = static_cast<const char*>(from) + rank * total + offset;
      std::memcpy(shared_.slot(shared_.rank()) + rank * step, part, bytes);
    }
    shared_.barrier("reduce_scatter");
    std::vector<const char*> pieces;
    for (size_t rank = 0; rank < nranks; ++rank) pieces.push_back(shared_.slot(rank) + shared_.rank() * step);
    standin::reduce(pieces, static_cast<char*>(to.pointer) + offset, bytes / element, to.type, op);
    shared_.barrier("reduce_scatter");
  }
}

void Communicator::all_reduce_pieces(Elements from, void* to, C_CCLReduceOp op, bool keep) {
  const size_t total = from.bytes(), element = element_bytes(from.type);
  for (size_t offset = 0; offset < total; offset += Shared::kSlotBytes) {
    const size_t bytes = std::min(Shared::kSlotBytes, total - offset);
    std::memcpy(shared_.slot(shared_.rank()), static_cast<char*>(from.pointer) + offset, bytes);
    shared_.barrier("all_reduce");
    std::vector<const char*> pieces;
    for (size_t rank = 0; rank < shared_.nranks(); ++rank) pieces.push_back(shared_.slot(rank));
    if (keep) standin::reduce(pieces, static_cast<char*>(to) + offset, bytes / element, from.type, op);
    shared_.barrier("all_reduce");
  }
}

void Communicator::all_reduce(Elements from, void* to, C_CCLReduceOp op) {
  std::lock_guard<std::mutex> lock(mutex_);
  const double others = static_cast<double>(shared_.nranks() - 1) / static_cast<double>(shared_.nranks());
  begin(Kind::kAllReduce, from.bytes(), 2.0 * static_cast<double>(from.bytes()) * others);
  all_reduce_pieces(from, to, op, true);
}

void Communicator::reduce(Elements from, void* to, C_CCLReduceOp op, size_t root) {
  std::lock_guard<std::mutex> lock(mutex_);
  begin(Kind::kReduce, from.bytes(), static_cast<double>(from.bytes()));
  all_reduce_pieces(from, to, op, shared_.rank() == root);
}

void Communicator::broadcast(Elements in_place, size_t root) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t total = in_place.bytes();
  begin(Kind::kBroadcast, total, static_cast<double>(total));
  for (size_t offset = 0; offset < total; offset += Shared::kSlotBytes) {
    const size_t bytes = std::min(Shared::kSlotBytes, total - offset);
    char* own = static_cast<char*>(in_place.pointer) + offset;
    if (shared_.rank() == root) std::memcpy(shared_.slot(root), own, bytes);
    shared_.barrier("broadcast");
    if (shared_.rank() != root) std::memcpy(own, shared_.slot(root), bytes);
    shared_.barrier("broadcast");
  }
}

size_t Communicator::largest_piece(const std::vector<Elements>& from, const std::vector<Elements>& to) {
  const size_t nranks = shared_.nranks(), own = shared_.rank();
  const auto sizes = [this](size_t rank) { return reinterpret_cast<uint64_t*>(shared_.slot(rank)); };
  for (size_t rank = 0; rank < nranks; ++rank) sizes(own)[rank] = from[rank].bytes();
  shared_.barrier("all_to_all");
  uint64_t largest = 0;
  for (size_t rank = 0; rank < nranks; ++rank) {
    largest = std::max(largest, *std::max_element(sizes(rank), sizes(rank) + nranks));
    if (sizes(rank)[own] == to[rank].bytes()) continue;
    give_up("all_to_all: rank " + std::to_string(rank) + " sends " + std::to_string(sizes(rank)[own]) +
            " bytes to rank " + std::to_string(own) + ", which expects " + std::to_string(to[rank].bytes()));
  }
  shared_.barrier("all_to_all");
  return largest;
}

void Communicator::all_to_all(const std::vector<Elements>& from, const std::vector<Elements>& to) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t nranks = shared_.nranks(), own = shared_.rank(), step = Shared::kSlotBytes / nranks;
  double to_others = 0.0;
  for (size_t rank = 0; rank < nranks; ++rank) to_others += rank == own ? 0.0 : static_cast<double>(from[rank].bytes());
  begin(Kind::kAllToAll, 0, to_others);
  const size_t largest = largest_piece(from, to);
  for (size_t offset = 0; offset < largest; offset += step) {
    for (size_t rank = 0; rank < nranks; ++rank) {
      std::memcpy(shared_.slot(own) + rank * step, at(from[rank], offset), left(from[rank], offset, step));
    }
    shared_.barrier("all_to_all");
    for (size_t rank = 0; rank < nranks; ++rank) {
      std::memcpy(at(to[rank], offset), shared_.slot(rank) + own * step, left(to[rank], offset, step));
    }
    shared_.barrier("all_to_all");
  }
}

void Communicator::send(Elements from, size_t to_rank) {
  Mailbox& box = shared_.mailbox(shared_.rank(), to_rank);
  const Settings now = settings();
  if (now.slows("send")) sleep_ms(now.duration_ms(static_cast<double>(from.bytes())));
  for (size_t offset = 0; offset < from.bytes(); offset += Mailbox::kBytes) {
    wait_while(box.full, 1, "send");
    box.bytes = from.bytes();
    std::memcpy(box.data, static_cast<char*>(from.pointer) + offset, std::min(Mailbox::kBytes, from.bytes() - offset));
    box.full.store(1);
    wake(box.full);
  }
}

void Communicator::receive(Elements to, size_t from_rank) {
  Mailbox& box = shared_.mailbox(from_rank, shared_.rank());
  for (size_t offset = 0; offset < to.bytes(); offset += Mailbox::kBytes) {
    wait_while(box.full, 0, "receive");
    if (box.bytes != to.bytes()) {
      give_up("a message of " + std::to_string(box.bytes) + " bytes where " + std::to_string(to.bytes()) +
              " were expected");
    }
    std::memcpy(static_cast<char*>(to.pointer) + offset, box.data, std::min(Mailbox::kBytes, to.bytes() - offset));
    box.full.store(0);
    wake(box.full);
  }
}

}  // namespace standin
