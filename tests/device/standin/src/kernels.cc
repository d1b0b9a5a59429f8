#include "kernels.h"

#include <string>
#include <utility>
#include <vector>

#include "counts.h"
#include "entries.h"
#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/common/place.h"
#include "paddle/phi/core/kernel_factory.h"
#include "queued.h"
#include "streams.h"

namespace standin {
namespace {

// The function of a kernel that eager mode calls. Paddle lets nobody read or set it, but an explicit instantiation may
// name what is private, and hand it on.
using Function = void* phi::Kernel::*;

Function function_of_kernel();

template <Function function>
struct Named {
  friend Function function_of_kernel() { return function; }
};

template struct Named<&phi::Kernel::variadic_fn_>;

// The kernel with every argument expected on the device, and entered after what its stream was told before.
phi::Kernel moved(const std::string& name, const phi::Kernel& kernel, phi::Backend backend, Entries& entries) {
  phi::Kernel result = kernel;
  void*& function = result.*function_of_kernel();
  if (function != nullptr) {
    may_queue(name, function);
    function = entries.into(function);
  }
  for (auto& input : result.mutable_args_def()->input_defs()) {
    if (input.backend == phi::Backend::CPU) input.SetBackend(backend);
  }
  for (auto& output : result.mutable_args_def()->output_defs()) {
    if (output.backend == phi::Backend::CPU) output.SetBackend(backend);
  }
  return result;
}

size_t count(const phi::KernelNameMap& all) {
  size_t found = 0;
  for (const auto& [name, kernels] : all) found += kernels.size();
  return found;
}

}  // namespace

void register_cpu_kernels(const char* device_type) {
  const phi::Backend backend = phi::TransToPhiBackend(phi::CustomPlace(device_type, 0));
  Entries entries(count(phi::KernelFactory::Instance().kernels()));
  for (auto& [name, kernels] : phi::KernelFactory::Instance().kernels()) {
    if (name.rfind("memcpy", 0) == 0) continue;  // Paddle has these for every device, and they know both sides
    std::vector<std::pair<phi::KernelKey, phi::Kernel>> found;
    for (const auto& [key, kernel] : kernels) {
      if (key.backend() != phi::Backend::CPU) continue;
      found.emplace_back(phi::KernelKey(backend, key.layout(), key.dtype()), moved(name, kernel, backend, entries));
    }
    for (auto& [key, kernel] : found) kernels[key] = std::move(kernel);
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
