#include "queued.h"

#include <exception>
#include <map>
#include <memory>
#include <tuple>
#include <unordered_map>

#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/kernels/assign_kernel.h"
#include "paddle/phi/kernels/cast_kernel.h"
#include "paddle/phi/kernels/elementwise_add_kernel.h"
#include "paddle/phi/kernels/elementwise_divide_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_kernel.h"
#include "paddle/phi/kernels/fill_kernel.h"
#include "paddle/phi/kernels/full_kernel.h"
#include "paddle/phi/kernels/scale_kernel.h"
#include "settings.h"
#include "streams.h"

namespace standin {
namespace {

using phi::DenseTensor;

// What the tensors of one call share they share afterwards, too.
using Blocks = std::map<const phi::Allocation*, std::shared_ptr<phi::Allocation>>;

// The same tensor, but its memory may be freed before the kernel's turn has come, as a device's may.
DenseTensor unheld(const DenseTensor& tensor, Blocks* blocks) {
  DenseTensor copy(tensor);
  const std::shared_ptr<phi::Allocation> block = tensor.Holder();
  if (block == nullptr) return copy;
  auto& known = (*blocks)[block.get()];
  if (known == nullptr) known = std::make_shared<phi::Allocation>(block->ptr(), block->size(), block->place());
  copy.ResetHolder(known);
  return copy;
}

// An argument, kept until the kernel's turn.
template <typename Argument>
struct Kept {
  Kept(const phi::CustomContext&, Argument given, Blocks*) : value(given) {}

  Argument get() { return value; }

  std::decay_t<Argument> value;
};

template <>
struct Kept<const DenseTensor&> {
  Kept(const phi::CustomContext&, const DenseTensor& given, Blocks* blocks) : value(unheld(given, blocks)) {}

  const DenseTensor& get() { return value; }

  DenseTensor value;
};

// A result has its memory from the start: whoever called works with it.
template <>
struct Kept<DenseTensor*> {
  Kept(const phi::CustomContext& context, DenseTensor* given, Blocks* blocks) {
    context.Alloc(given, given->dtype());
    value = unheld(*given, blocks);
  }

  DenseTensor* get() { return &value; }

  DenseTensor value;
};

template <typename... Arguments>
using Function = void (*)(const phi::DeviceContext&, Arguments...);

thread_local void* called = nullptr;  // what queueing() was asked for last: the caller comes to put_on_stream next

template <typename... Arguments>
void put_on_stream(const phi::DeviceContext& device, Arguments... arguments) {
  const auto& context = static_cast<const phi::CustomContext&>(device);
  const auto function = reinterpret_cast<Function<Arguments...>>(called);
  Blocks blocks;
  auto kept = std::make_shared<std::tuple<Kept<Arguments>...>>(Kept<Arguments>(context, arguments, &blocks)...);
  stream_of(static_cast<C_Stream>(context.stream()))->run([&context, function, kept] {
    try {
      std::apply([&](auto&... each) { function(context, each.get()...); }, *kept);
    } catch (const std::exception& error) {
      give_up(std::string("a kernel on a stream of its own: ") + error.what());
    }
  });
}

template <typename... Arguments>
void* putting(void (*)(const phi::CustomContext&, Arguments...)) {
  return reinterpret_cast<void*>(&put_on_stream<Arguments...>);
}

const std::unordered_map<std::string, void*>& by_name() {
  using Context = phi::CustomContext;
  static const auto* known = new std::unordered_map<std::string, void*>{
      {"add", putting(decltype(&phi::AddKernel<float, Context>){})},
      {"assign", putting(decltype(&phi::AssignKernel<Context>){})},
      {"cast", putting(decltype(&phi::CastKernel<float, Context>){})},
      {"divide", putting(decltype(&phi::DivideKernel<float, Context>){})},
      {"fill", putting(decltype(&phi::FillKernel<float, Context>){})},
      {"full", putting(decltype(&phi::FullKernel<float, Context>){})},
      {"full_like", putting(decltype(&phi::FullLikeKernel<float, Context>){})},
      {"multiply", putting(decltype(&phi::MultiplyKernel<float, Context>){})},
      {"scale", putting(decltype(&phi::ScaleKernel<float, Context>){})},
      {"subtract", putting(decltype(&phi::SubtractKernel<float, Context>){})},
  };
  return *known;
}

std::unordered_map<void*, void*>& by_function() {
  static auto* known = new std::unordered_map<void*, void*>;
  return *known;
}

}  // namespace

void may_queue(const std::string& name, void* function) {
  const auto found = by_name().find(name);
  if (found != by_name().end()) by_function()[function] = found->second;
}

void* queueing(void* function) {
  const auto found = by_function().find(function);
  if (found == by_function().end()) return nullptr;
  called = function;
  return found->second;
}

}  // namespace standin
