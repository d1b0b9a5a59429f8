// The collectives themselves, as what a stream's thread does when their turn has come.
#pragma once

#include <cstdint>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "shared.h"
#include "sums.h"

namespace standin {

// Elements of one type at an address. `count` is what the collective's C function calls so.
struct Elements {
  void* pointer;
  size_t count;
  C_DataType type;

  size_t bytes() const { return count * element_bytes(type); }
};

enum class Kind : uint32_t { kAllGather = 1, kReduceScatter, kAllReduce, kReduce, kBroadcast, kAllToAll, kSend, kReceive };

// As in STANDIN_SLOWED.
const char* name_of(Kind kind);

// A rank's end of a communicator. Collectives block; each begins late by the jitter, takes at least the time that
// latency and bandwidth say, and touches its tensors only at the end of it, when a missing wait has long gone wrong.
class Communicator {
 public:
  Communicator(const std::string& name, size_t rank, size_t nranks);

  // `from.count` elements of every rank, into that times the number of ranks at `to`.
  void all_gather(Elements from, void* to);

  // The sum of every rank's `to.count` times number of ranks elements at `from`; this rank's part of it.
  void reduce_scatter(const void* from, Elements to, C_CCLReduceOp op);

  void all_reduce(Elements from, void* to, C_CCLReduceOp op);

  void reduce(Elements from, void* to, C_CCLReduceOp op, size_t root);

  void broadcast(Elements in_place, size_t root);

  // from[r] to rank r, to[r] from it. A size may be any, 0 too, if its two ranks agree on it.
  void all_to_all(const std::vector<Elements>& from, const std::vector<Elements>& to);

  void send(Elements from, size_t to_rank);

  void receive(Elements to, size_t from_rank);

 private:
  // Waits for the others and for the time it takes; ends the process if a rank is in another collective.
  void begin(Kind kind, size_t bytes, double wire_bytes);

  void all_reduce_pieces(Elements from, void* to, C_CCLReduceOp op, bool keep);

  // The bytes of the largest piece that any rank sends to any other. Ends the process if two differ about a size.
  size_t largest_piece(const std::vector<Elements>& from, const std::vector<Elements>& to);

  void be_late(const char* kind);

  std::mutex mutex_;  // two streams may use one communicator
  Shared shared_;
  std::mt19937_64 random_;
};

}  // namespace standin
