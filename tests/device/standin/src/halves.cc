#include "halves.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/common/bfloat16.h"
#include "paddle/phi/common/float16.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/kernel_utils.h"
#include "paddle/phi/kernels/activation_grad_kernel.h"
#include "paddle/phi/kernels/activation_kernel.h"
#include "paddle/phi/kernels/adam_kernel.h"
#include "paddle/phi/kernels/adamw_kernel.h"
#include "paddle/phi/kernels/amp_kernel.h"
#include "paddle/phi/kernels/clip_grad_kernel.h"
#include "paddle/phi/kernels/clip_kernel.h"
#include "paddle/phi/kernels/concat_grad_kernel.h"
#include "paddle/phi/kernels/cross_entropy_grad_kernel.h"
#include "paddle/phi/kernels/cross_entropy_kernel.h"
#include "paddle/phi/kernels/elementwise_add_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_add_kernel.h"
#include "paddle/phi/kernels/elementwise_divide_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_divide_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_kernel.h"
#include "paddle/phi/kernels/gelu_grad_kernel.h"
#include "paddle/phi/kernels/gelu_kernel.h"
#include "paddle/phi/kernels/layer_norm_grad_kernel.h"
#include "paddle/phi/kernels/layer_norm_kernel.h"
#include "paddle/phi/kernels/matmul_grad_kernel.h"
#include "paddle/phi/kernels/matmul_kernel.h"
#include "paddle/phi/kernels/mean_all_grad_kernel.h"
#include "paddle/phi/kernels/mean_all_kernel.h"
#include "paddle/phi/kernels/momentum_kernel.h"
#include "paddle/phi/kernels/reduce_mean_grad_kernel.h"
#include "paddle/phi/kernels/reduce_mean_kernel.h"
#include "paddle/phi/kernels/sgd_kernel.h"
#include "paddle/phi/kernels/softmax_grad_kernel.h"
#include "paddle/phi/kernels/softmax_kernel.h"
#include "paddle/phi/kernels/squared_l2_norm_kernel.h"
#include "paddle/phi/kernels/tril_triu_kernel.h"
#include "settings.h"

namespace standin {
namespace {

using phi::DataType;
using phi::DenseTensor;
using Context = phi::CustomContext;

bool is_half(const DenseTensor& tensor) {
  return tensor.dtype() == DataType::FLOAT16 || tensor.dtype() == DataType::BFLOAT16;
}

// Whether there is something to read. Paddle leaves shapes without memory to backward operations that need no values.
bool has_values(const DenseTensor& tensor) {
  const size_t bytes = static_cast<size_t>(tensor.numel()) * phi::SizeOf(tensor.dtype());
  return bytes == 0 || (tensor.Holder() != nullptr && tensor.Holder()->size() >= bytes);
}

// Of this type, with the shape of `tensor`. Its memory is the host's, so that the device's accounts show what a program
// has taken; whoever reads it before it is written finds NaN.
DenseTensor scratch(const Context& context, const DenseTensor& tensor, DataType type) {
  if (!tensor.meta().is_contiguous()) give_up("a kernel for 16-bit floats got a tensor with gaps");
  const size_t bytes = static_cast<size_t>(tensor.numel()) * phi::SizeOf(type);
  void* memory = std::malloc(bytes + 1);
  if (memory == nullptr) give_up("no memory for a kernel for 16-bit floats");
  std::memset(memory, 0xFF, bytes);
  const auto release = [](phi::Allocation* block) { std::free(block->ptr()); };
  phi::DenseTensorMeta meta(type, tensor.dims());
  return DenseTensor(std::make_shared<phi::Allocation>(memory, bytes, release, context.GetPlace()), meta);
}

template <typename From, typename To>
void convert_as(const DenseTensor& from, DenseTensor* to) {
  const auto* source = static_cast<const From*>(from.data());
  auto* target = static_cast<To*>(to->data());
  for (int64_t i = 0; i < from.numel(); ++i) target[i] = static_cast<To>(static_cast<float>(source[i]));
}

DenseTensor widened(const Context& context, const DenseTensor& half) {
  DenseTensor wide = scratch(context, half, DataType::FLOAT32);
  if (half.dtype() == DataType::FLOAT16) {
    convert_as<phi::dtype::float16, float>(half, &wide);
  } else {
    convert_as<phi::dtype::bfloat16, float>(half, &wide);
  }
  return wide;
}

// Writes `wide` to `half`, of a type that it has already, and gives it memory where it has none.
void narrow(const Context& context, const DenseTensor& wide, DenseTensor* half) {
  if (half->dims() != wide.dims()) half->Resize(wide.dims());
  context.Alloc(half, half->dtype());
  if (half->dtype() == DataType::FLOAT16) {
    convert_as<float, phi::dtype::float16>(wide, half);
  } else {
    convert_as<float, phi::dtype::bfloat16>(wide, half);
  }
}

// An argument as the kernel for float32 takes it: get() before that, finish() after it.
template <typename Argument>
struct Wide {
  Wide(const Context&, Argument given) : value(given) {}

  Argument get() { return value; }

  void finish() {}

  Argument value;
};

template <>
struct Wide<const DenseTensor&> {
  Wide(const Context& context, const DenseTensor& tensor) : given(&tensor) {
    if (!has_values(tensor)) {
      own = scratch(context, tensor, is_half(tensor) ? DataType::FLOAT32 : tensor.dtype());
    } else if (is_half(tensor)) {
      own = widened(context, tensor);
    }
  }

  const DenseTensor& get() { return own ? *own : *given; }

  void finish() {}

  const DenseTensor* given;
  std::optional<DenseTensor> own;
};

template <>
struct Wide<const paddle::optional<DenseTensor>&> {
  Wide(const Context& context, const paddle::optional<DenseTensor>& tensor) {
    if (tensor) value = Wide<const DenseTensor&>(context, *tensor).get();
  }

  const paddle::optional<DenseTensor>& get() { return value; }

  void finish() {}

  paddle::optional<DenseTensor> value;
};

template <>
struct Wide<const std::vector<const DenseTensor*>&> {
  Wide(const Context& context, const std::vector<const DenseTensor*>& tensors) {
    for (const DenseTensor* tensor : tensors) each.emplace_back(context, *tensor);
  }

  const std::vector<const DenseTensor*>& get() {
    pointers.clear();
    for (auto& one : each) pointers.push_back(&one.get());
    return pointers;
  }

  void finish() {}

  std::vector<Wide<const DenseTensor&>> each;
  std::vector<const DenseTensor*> pointers;
};

template <>
struct Wide<DenseTensor*> {
  Wide(const Context& context, DenseTensor* tensor) : context(&context), given(tensor) {
    if (given != nullptr && is_half(*given)) own = scratch(context, *given, DataType::FLOAT32);
  }

  DenseTensor* get() { return own ? &*own : given; }

  void finish() {
    if (own) narrow(*context, *own, given);
  }

  const Context* context;
  DenseTensor* given;
  std::optional<DenseTensor> own;
};

template <>
struct Wide<std::vector<DenseTensor*>> {
  Wide(const Context& context, const std::vector<DenseTensor*>& tensors) {
    for (DenseTensor* tensor : tensors) each.emplace_back(context, tensor);
  }

  std::vector<DenseTensor*> get() {
    std::vector<DenseTensor*> pointers;
    for (auto& one : each) pointers.push_back(one.get());
    return pointers;
  }

  void finish() {
    for (auto& one : each) one.finish();
  }

  std::vector<Wide<DenseTensor*>> each;
};

template <typename... Arguments>
using Function = void (*)(const Context&, Arguments...);

template <typename... Arguments>
void call(const Context& context, void* function, std::tuple<Wide<Arguments>...>& wide) {
  std::apply(
      [&](auto&... each) {
        reinterpret_cast<Function<Arguments...>>(function)(context, each.get()...);
        (each.finish(), ...);
      },
      wide);
}

// What a kernel made here goes on to; each has a `Tag` of its own.
template <typename Tag>
void* original = nullptr;

template <typename Tag, typename... Arguments>
void call_original(const Context& context, Arguments... arguments) {
  std::tuple<Wide<Arguments>...> wide(Wide<Arguments>(context, arguments)...);
  call<Arguments...>(context, original<Tag>, wide);
}

template <typename Argument, typename... Arguments>
constexpr size_t first_index() {
  size_t index = 0;
  ((std::is_same_v<Argument, Arguments> || (++index, false)) || ...);
  return index;
}

// An optimizer's kernel: its first input and output are the parameter, its last output is the master weight, its
// argument `kMaster` is the master weight or nothing, and its argument `kMultiPrecision` says which.
template <typename Tag, size_t kMaster, size_t kMultiPrecision, typename... Arguments>
void call_on_master(const Context& context, Arguments... arguments) {
  constexpr size_t kParamOut = first_index<DenseTensor*, Arguments...>(), kMasterOut = sizeof...(Arguments) - 1;
  const std::tuple<Arguments...> given(arguments...);
  std::tuple<Wide<Arguments>...> wide(Wide<Arguments>(context, arguments)...);
  const auto& master = std::get<kMaster>(given);
  if (!master) return call<Arguments...>(context, original<Tag>, wide);
  DenseTensor* const master_out = std::get<kMasterOut>(given);
  std::get<0>(wide) = Wide<const DenseTensor&>(context, *master);
  std::get<kMaster>(wide).value = paddle::none;
  std::get<kMultiPrecision>(wide).value = false;
  std::get<kParamOut>(wide) = Wide<DenseTensor*>(context, master_out);
  std::get<kMasterOut>(wide) = Wide<DenseTensor*>(context, nullptr);
  call<Arguments...>(context, original<Tag>, wide);
  narrow(context, *master_out, std::get<kParamOut>(given));
}

// A kernel made here, and where to put what it goes on to.
struct Made {
  Adapted adapted;
  void** original;
};

template <typename Tag, typename... Arguments>
Made made(Function<Arguments...>) {
  constexpr Function<Arguments...> function = &call_original<Tag, Arguments...>;
  return {{reinterpret_cast<void*>(function), &phi::KernelImpl<Function<Arguments...>, function>::Compute},
          &original<Tag>};
}

template <typename Tag, size_t kMaster, size_t kMultiPrecision, typename... Arguments>
Made made_on_master(Function<Arguments...>) {
  constexpr Function<Arguments...> function = &call_on_master<Tag, kMaster, kMultiPrecision, Arguments...>;
  return {{reinterpret_cast<void*>(function), &phi::KernelImpl<Function<Arguments...>, function>::Compute},
          &original<Tag>};
}

using ByName = std::unordered_map<std::string, Made>;

#define KERNEL(kernel, type) decltype(&phi::kernel##Kernel<type, Context>){}
#define HALF(name, kernel) {name, made<struct kernel##Half>(KERNEL(kernel, float))}
#define HALF_WITH_GRAD(name, kernel) HALF(name, kernel), HALF(name "_grad", kernel##Grad)
#define OPTIMIZER(name, kernel, master, multi_precision) \
  {name, made_on_master<struct kernel##Half, master, multi_precision>(KERNEL(kernel, float))}

const ByName& halves() {
  static const auto* known = new ByName{
      HALF_WITH_GRAD("add", Add),
      HALF_WITH_GRAD("clip", Clip),
      HALF_WITH_GRAD("cross_entropy_with_softmax", CrossEntropyWithSoftmax),
      HALF_WITH_GRAD("divide", Divide),
      HALF_WITH_GRAD("exp", Exp),
      HALF_WITH_GRAD("gelu", Gelu),
      HALF_WITH_GRAD("layer_norm", LayerNorm),
      HALF_WITH_GRAD("matmul", Matmul),
      HALF_WITH_GRAD("mean_all", MeanAll),
      HALF_WITH_GRAD("multiply", Multiply),
      HALF_WITH_GRAD("pow", Pow),
      HALF_WITH_GRAD("relu", Relu),
      HALF_WITH_GRAD("sigmoid", Sigmoid),
      HALF_WITH_GRAD("silu", Silu),
      HALF_WITH_GRAD("softmax", Softmax),
      HALF_WITH_GRAD("sqrt", Sqrt),
      HALF_WITH_GRAD("square", Square),
      HALF_WITH_GRAD("subtract", Subtract),
      HALF_WITH_GRAD("tanh", Tanh),
      HALF("check_finite_and_unscale", CheckFiniteAndUnscale),
      HALF("concat_grad", ConcatGrad),
      HALF("mean", Mean),
      HALF("mean_grad", ReduceMeanGrad),
      HALF("squared_l2_norm", SquaredL2Norm),
      HALF("tril", Tril),
      HALF("triu", Triu),
      OPTIMIZER("adam", AdamDense, 8, 15),
      OPTIMIZER("adamw", AdamwDense, 8, 18),
      OPTIMIZER("momentum", MomentumDense, 4, 9),
      OPTIMIZER("sgd", SGDDense, 3, 4),
  };
  return *known;
}

const std::map<std::pair<std::string, DataType>, Made>& mends() {
  static const auto* known = new std::map<std::pair<std::string, DataType>, Made>{
      // On devices, not on CPU, Paddle calls it with an input without memory, which it does not need, but looks at.
      {{"multiply_grad", DataType::FLOAT32}, made<struct MultiplyGrad32>(KERNEL(MultiplyGrad, float))},
      {{"multiply_grad", DataType::FLOAT64}, made<struct MultiplyGrad64>(KERNEL(MultiplyGrad, double))},
      // The loss of bfloat16 is float32, and so is its gradient.
      {{"cross_entropy_with_softmax_grad", DataType::FLOAT32},
       made<struct CrossEntropyGrad32>(KERNEL(CrossEntropyWithSoftmaxGrad, float))},
  };
  return *known;
}

std::optional<Adapted> leading_to(const Made& made, void* function) {
  *made.original = function;
  return made.adapted;
}

}  // namespace

size_t count_of_halves() { return halves().size(); }

std::optional<Adapted> through_floats(const std::string& name, void* function) {
  const auto found = halves().find(name);
  if (found == halves().end()) return std::nullopt;
  return leading_to(found->second, function);
}

std::optional<Adapted> mended(const std::string& name, DataType type, void* function) {
  const auto found = mends().find({name, type});
  if (found == mends().end()) return std::nullopt;
  return leading_to(found->second, function);
}

}  // namespace standin
