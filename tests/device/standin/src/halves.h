// Kernels for 16-bit floats, which Paddle does not have for the CPU, and which mixed precision needs.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "paddle/phi/common/data_type.h"
#include "paddle/phi/core/kernel_factory.h"

namespace standin {

// A kernel made of another one: as eager mode calls it, and as Paddle's older operators do.
struct Adapted {
  void* function;
  phi::KernelFn compute;
};

// How many kernels through_floats() knows.
size_t count_of_halves();

// The kernel `name` for both types of 16 bits: `function`, that for float32, between conversions. What it writes is
// rounded once, to the nearest. An optimizer's updates the master weights, where there are any, and rounds these.
std::optional<Adapted> through_floats(const std::string& name, void* function);

// The kernel `name` for this type, around `function`, which cannot take all that it is called with on a device.
std::optional<Adapted> mended(const std::string& name, phi::DataType type, void* function);

}  // namespace standin
