// Reductions of several ranks' pieces, in the order of the ranks, so that every rank and every run has the same bits.
#pragma once

#include <cstddef>
#include <vector>

#include "paddle/phi/backends/device_ext.h"

namespace standin {

// Bytes of an element; 0 for what the stand-in does not know.
size_t element_bytes(C_DataType type);

// True if pieces of this type can be reduced by this operation.
bool can_reduce(C_DataType type, C_CCLReduceOp op);

// Writes the reduction of `count` elements at each of `pieces` to `out`. Sums of 16-bit floats are rounded to their 16
// bits after each addition, as where a device's library passes partial sums on from rank to rank.
void reduce(const std::vector<const char*>& pieces, void* out, size_t count, C_DataType type, C_CCLReduceOp op);

}  // namespace standin
