#include "xccl.h"

#include <unistd.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "collectives.h"
#include "counts.h"
#include "streams.h"

namespace standin {
namespace {

constexpr size_t kIdBytes = 64;

// What Paddle holds. The streams' work holds the communicator itself, and so may outlive this.
struct Handle {
  std::shared_ptr<Communicator> communicator;
  std::string name;
};

std::shared_ptr<Communicator> communicator_of(C_CCLComm comm) {
  return reinterpret_cast<Handle*>(comm)->communicator;
}

C_Status unique_id_size(size_t* size) {
  *size = kIdBytes;
  return C_SUCCESS;
}

C_Status unique_id(C_CCLRootId* id) {
  std::random_device random;
  std::snprintf(static_cast<char*>(id->data), kIdBytes, "/standin_%d_%08x%08x%08x", getpid(), random(), random(),
                random());
  return C_SUCCESS;
}

C_Status init_rank(size_t nranks, C_CCLRootId* id, size_t rank, C_CCLComm* comm) {
  const std::string name(static_cast<const char*>(id->data));
  *comm = reinterpret_cast<C_CCLComm>(new Handle{std::make_shared<Communicator>(name, rank, nranks), name});
  return C_SUCCESS;
}

C_Status destroy(C_CCLComm comm) {
  delete reinterpret_cast<Handle*>(comm);
  return C_SUCCESS;
}

C_Status comm_name(C_CCLComm comm, char* name) {
  std::snprintf(name, kIdBytes, "%s", reinterpret_cast<Handle*>(comm)->name.c_str());
  return C_SUCCESS;
}

using Collective = std::function<void(Communicator&)>;

// Puts a collective on a stream. On the compute stream it is carried out at once, and the host waits for it.
C_Status issue(Kind kind, C_CCLComm comm, C_Stream stream, const Collective& collective) {
  const std::string name = name_of(kind);
  count_collective(name, Stage::kIssued);
  const auto work = [=, communicator = communicator_of(comm)] {
    count_collective(name, Stage::kBegun);
    collective(*communicator);
    count_collective(name, Stage::kFinished);
  };
  if (stream_of(stream)->immediate()) {
    wait_on_host(Wait::kCompute, false, work);
  } else {
    stream_of(stream)->run(work);
  }
  return C_SUCCESS;
}

C_Status all_gather(void* from, void* to, size_t count, C_DataType type, C_CCLComm comm, C_Stream stream) {
  if (element_bytes(type) == 0) return C_FAILED;
  const Elements elements{from, count, type};
  return issue(Kind::kAllGather, comm, stream, [=](Communicator& ranks) { ranks.all_gather(elements, to); });
}

C_Status reduce_scatter(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                        C_Stream stream) {
  if (!can_reduce(type, op)) return C_FAILED;
  const Elements elements{to, count, type};
  return issue(Kind::kReduceScatter, comm, stream,
               [=](Communicator& ranks) { ranks.reduce_scatter(from, elements, op); });
}

C_Status all_reduce(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, C_CCLComm comm,
                    C_Stream stream) {
  if (!can_reduce(type, op)) return C_FAILED;
  const Elements elements{from, count, type};
  return issue(Kind::kAllReduce, comm, stream, [=](Communicator& ranks) { ranks.all_reduce(elements, to, op); });
}

C_Status reduce_to(void* from, void* to, size_t count, C_DataType type, C_CCLReduceOp op, size_t root, C_CCLComm comm,
                   C_Stream stream) {
  if (!can_reduce(type, op)) return C_FAILED;
  const Elements elements{from, count, type};
  return issue(Kind::kReduce, comm, stream, [=](Communicator& ranks) { ranks.reduce(elements, to, op, root); });
}

C_Status broadcast(void* buffer, size_t count, C_DataType type, size_t root, C_CCLComm comm, C_Stream stream) {
  if (element_bytes(type) == 0) return C_FAILED;
  const Elements elements{buffer, count, type};
  return issue(Kind::kBroadcast, comm, stream, [=](Communicator& ranks) { ranks.broadcast(elements, root); });
}

// What Paddle's arrays say is copied: they are gone when the collective's turn comes.
C_Status all_to_all(const void** from, const size_t* from_counts, const C_DataType* from_types, void** to,
                    const size_t* to_counts, const C_DataType* to_types, size_t, size_t nranks, C_CCLComm comm,
                    C_Stream stream) {
  std::vector<Elements> sent, received;
  for (size_t rank = 0; rank < nranks; ++rank) {
    if (element_bytes(from_types[rank]) == 0 || element_bytes(to_types[rank]) == 0) return C_FAILED;
    sent.push_back({const_cast<void*>(from[rank]), from_counts[rank], from_types[rank]});
    received.push_back({to[rank], to_counts[rank], to_types[rank]});
  }
  return issue(Kind::kAllToAll, comm, stream, [=](Communicator& ranks) { ranks.all_to_all(sent, received); });
}

// Paddle's process group of custom devices puts no sends and receives into groups, and collectives need none.
C_Status no_group() { return C_SUCCESS; }

C_Status send(void* from, size_t count, C_DataType type, size_t to_rank, C_CCLComm comm, C_Stream stream) {
  if (element_bytes(type) == 0) return C_FAILED;
  const Elements elements{from, count, type};
  return issue(Kind::kSend, comm, stream, [=](Communicator& ranks) { ranks.send(elements, to_rank); });
}

C_Status receive(void* to, size_t count, C_DataType type, size_t from_rank, C_CCLComm comm, C_Stream stream) {
  if (element_bytes(type) == 0) return C_FAILED;
  const Elements elements{to, count, type};
  return issue(Kind::kReceive, comm, stream, [=](Communicator& ranks) { ranks.receive(elements, from_rank); });
}

}  // namespace

void fill_xccl_interface(C_DeviceInterface* interface) {
  interface->xccl_get_comm_name = comm_name;
  interface->xccl_get_unique_id_size = unique_id_size;
  interface->xccl_get_unique_id = unique_id;
  interface->xccl_comm_init_rank = init_rank;
  interface->xccl_destroy_comm = destroy;
  interface->xccl_all_gather = all_gather;
  interface->xccl_reduce_scatter = reduce_scatter;
  interface->xccl_all_reduce = all_reduce;
  interface->xccl_reduce = reduce_to;
  interface->xccl_broadcast = broadcast;
  interface->xccl_group_start = no_group;
  interface->xccl_group_end = no_group;
  interface->xccl_all_to_all = all_to_all;
  interface->xccl_send = send;
  interface->xccl_recv = receive;
}

}  // namespace standin
