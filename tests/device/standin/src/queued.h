// The kernels that a stream of one's own carries out in its turn, as a device would: what add up, convert, scale, copy
// and fill. The tensors they work on are held by nobody meanwhile but whoever called.
#pragma once

#include <string>

namespace standin {

// Says that `function` is that of the kernel called `name`, before the first call of queueing().
void may_queue(const std::string& name, void* function);

// A function to be called in this thread at once in place of `function`, with the same arguments: it puts the work on
// the stream of its context, where that is not the compute stream. nullptr: this kernel cannot be put off.
void* queueing(void* function);

}  // namespace standin
