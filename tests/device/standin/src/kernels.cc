#include "kernels.h"

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/common/int_array.h"
#include "paddle/phi/common/place.h"
#include "paddle/phi/common/scalar.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/kernel_context.h"
#include "paddle/phi/core/kernel_factory.h"
#include "paddle/phi/core/kernel_utils.h"

namespace standin {
namespace {

using phi::DenseTensor;
using Tensors = std::vector<DenseTensor*>;

// Paddle's process group splits the result of a gather with the context of its own stream. A kernel for the CPU would
// do so at once, so these two wait for that stream first. What they wrap, by type:
template <typename Sections>
using Split = void (*)(const phi::CustomContext&, const DenseTensor&, Sections, const phi::Scalar&, Tensors);

template <typename Sections>
std::unordered_map<int, Split<Sections>>& splits() {
  static auto* splits = new std::unordered_map<int, Split<Sections>>;
  return *splits;
}

template <typename Sections>
void split_after_stream(const phi::CustomContext& context, const DenseTensor& tensor, Sections sections,
                        const phi::Scalar& axis, Tensors out) {
  context.Wait();
  splits<Sections>().at(static_cast<int>(tensor.dtype()))(context, tensor, sections, axis, std::move(out));
}

template <typename Sections>
phi::Kernel waiting(const phi::KernelKey& key, const phi::Kernel& kernel) {
  splits<Sections>()[static_cast<int>(key.dtype())] = kernel.GetVariadicKernelFn<Split<Sections>>();
  constexpr auto wrapped = &split_after_stream<Sections>;
  phi::Kernel result(phi::KernelImpl<Split<Sections>, wrapped>::Compute, reinterpret_cast<void*>(wrapped));
  *result.mutable_args_def() = kernel.args_def();
  return result;
}

// The kernel with every argument expected on the device.
phi::Kernel moved(const std::string& name, const phi::KernelKey& key, const phi::Kernel& kernel, phi::Backend backend) {
  phi::Kernel result = kernel;
  if (key.layout() == phi::DataLayout::ALL_LAYOUT && name == "split") {
    result = waiting<const phi::IntArray&>(key, kernel);
  } else if (key.layout() == phi::DataLayout::ALL_LAYOUT && name == "split_with_num") {
    result = waiting<int>(key, kernel);
  }
  for (auto& input : result.mutable_args_def()->input_defs()) {
    if (input.backend == phi::Backend::CPU) input.SetBackend(backend);
  }
  for (auto& output : result.mutable_args_def()->output_defs()) {
    if (output.backend == phi::Backend::CPU) output.SetBackend(backend);
  }
  return result;
}

}  // namespace

void register_cpu_kernels(const char* device_type) {
  const phi::Backend backend = phi::TransToPhiBackend(phi::CustomPlace(device_type, 0));
  for (auto& [name, kernels] : phi::KernelFactory::Instance().kernels()) {
    if (name.rfind("memcpy", 0) == 0) continue;  // Paddle has these for every device, and they know both sides
    std::vector<std::pair<phi::KernelKey, phi::Kernel>> found;
    for (const auto& [key, kernel] : kernels) {
      if (key.backend() != phi::Backend::CPU) continue;
      found.emplace_back(phi::KernelKey(backend, key.layout(), key.dtype()), moved(name, key, kernel, backend));
    }
    for (auto& [key, kernel] : found) kernels[key] = std::move(kernel);
  }
}

}  // namespace standin
