// Paddle's own kernels, so that the device can compute.
#pragma once

namespace standin {

// Registers every kernel that Paddle has for the CPU for the device of this type as well, and those of halves.h.
//
// Without them Paddle copies to the CPU, computes there and copies back, and what an operation writes into a view of a
// flat buffer is lost. The kernels take the device's context for a CPU's; of that they use what both have: the place,
// the allocators and an Eigen device without state. On a stream of one's own a kernel is carried out in its turn, or
// waits in the calling thread for what that stream was told before, see queued.h.
void register_cpu_kernels(const char* device_type);

}  // namespace standin
