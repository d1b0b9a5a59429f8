// The device's memory: memory of the host, counted, and poisoned with bytes 0xFF (NaN in every float type) before its
// first use and after its last.
#pragma once

#include "paddle/phi/backends/device_ext.h"

namespace standin {

// What the device claims to have.
constexpr size_t kTotalBytes = size_t{4} << 30;

void fill_memory_interface(C_DeviceInterface* interface);

}  // namespace standin
