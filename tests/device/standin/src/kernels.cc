#include "kernels.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "counts.h"
#include "entries.h"
#include "halves.h"
#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/common/place.h"
#include "paddle/phi/core/kernel_factory.h"
#include "queued.h"
#include "streams.h"

namespace standin {
namespace {

// The two functions of a kernel, that which eager mode calls, and that which Paddle's older operators call. Paddle lets
// nobody read or set them, but an explicit instantiation may name what is private, and hand it on.
using Function = void* phi::Kernel::*;
using Compute = phi::KernelFn phi::Kernel::*;

Function function_of_kernel();
Compute compute_of_kernel();

template <Function function, Compute compute>
struct Named {
  friend Function function_of_kernel() { return function; }
  friend Compute compute_of_kernel() { return compute; }
};

template struct Named<&phi::Kernel::variadic_fn_, &phi::Kernel::fn_>;

// The kernel with every argument expected on the device.
phi::Kernel moved(const phi::Kernel& kernel, phi::Backend backend) {
  phi::Kernel result = kernel;
  for (auto& input : result.mutable_args_def()->input_defs()) {
    if (input.backend == phi::Backend::CPU) input.SetBackend(backend);
  }
  for (auto& output : result.mutable_args_def()->output_defs()) {
    if (output.backend == phi::Backend::CPU) output.SetBackend(backend);
  }
  return result;
}

// Has whatever eager mode calls come after what its stream was told before.
void enter(const std::string& name, phi::Kernel* kernel, Entries& entries) {
  void*& function = kernel->*function_of_kernel();
  if (function == nullptr) return;
  may_queue(name, function);
  function = entries.into(function);
}

using Kernels = std::vector<std::pair<phi::KernelKey, phi::Kernel>>;

// Adds what the device has of a kernel that Paddle has for the CPU: the same to `own`, and to `halves` those for 16-bit
// floats that can be made of it.
void add_kernels(const std::string& name, const phi::KernelKey& key, const phi::Kernel& kernel, Entries& entries,
                 Kernels* own, Kernels* halves) {
  void* const function = kernel.*function_of_kernel();
  const auto add = [&](Kernels* to, phi::DataType type, const std::optional<Adapted>& adapted) {
    phi::Kernel made = kernel;
    if (adapted) {
      made.*function_of_kernel() = adapted->function;
      made.*compute_of_kernel() = adapted->compute;
    }
    enter(name, &made, entries);
    to->emplace_back(phi::KernelKey(key.backend(), key.layout(), type), made);
  };
  add(own, key.dtype(), mended(name, key.dtype(), function));
  if (key.dtype() != phi::DataType::FLOAT32) return;
  const auto adapted = through_floats(name, function);
  if (!adapted) return;
  for (const auto type : {phi::DataType::FLOAT16, phi::DataType::BFLOAT16}) add(halves, type, adapted);
}

size_t count(const phi::KernelNameMap& all) {
  size_t found = 0;
  for (const auto& [name, kernels] : all) found += kernels.size();
  return found;
}

}  // namespace

void register_cpu_kernels(const char* device_type) {
  const phi::Backend backend = phi::TransToPhiBackend(phi::CustomPlace(device_type, 0));
  Entries entries(count(phi::KernelFactory::Instance().kernels()) + 2 * count_of_halves());
  for (auto& [name, kernels] : phi::KernelFactory::Instance().kernels()) {
    if (name.rfind("memcpy", 0) == 0) continue;  // Paddle has these for every device, and they know both sides
    Kernels own, halves;
    for (const auto& [key, kernel] : kernels) {
      if (key.backend() != phi::Backend::CPU) continue;
      const phi::KernelKey here(backend, key.layout(), key.dtype());
      add_kernels(name, here, moved(kernel, backend), entries, &own, &halves);
    }
    for (auto* found : {&own, &halves}) {  // in this order: ours take the place of the few that Paddle has
      for (auto& [key, kernel] : *found) kernels[key] = std::move(kernel);
    }
  }
  entries.close();
}

}  // namespace standin

// A kernel for the CPU works at once, in the thread that calls it. The compute stream does so too, so the two keep their
// order. On any other stream the kernel is put off until its turn, or, where that cannot be done, waits for what the
// stream was told before: such as where Paddle's process group splits what was gathered.
void* standin_before_kernel(const void* first, void* function) noexcept {
  const auto* device = static_cast<const phi::DeviceContext*>(first);
  auto* stream = standin::stream_of(static_cast<C_Stream>(static_cast<const phi::CustomContext*>(device)->stream()));
  if (stream == nullptr || stream->immediate()) return function;
  void* queueing = standin::queueing(function);
  if (queueing != nullptr) return queueing;
  standin::wait_on_host(standin::Wait::kKernel, stream->idle(), [stream] { stream->synchronize(); });
  return function;
}
