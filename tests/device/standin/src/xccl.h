// The collective library as Paddle calls it: communicators by unique id, collectives put on streams.
#pragma once

#include "paddle/phi/backends/device_ext.h"

namespace standin {

void fill_xccl_interface(C_DeviceInterface* interface);

}  // namespace standin
