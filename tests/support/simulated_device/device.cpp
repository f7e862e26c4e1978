// A CUDA device whose memory is the host's, for a torch without CUDA. __init__.py says what it is for.
//
// torch asks four registries about a device, and each has an entry here: the hooks (is there a GPU, how many), the
// guard (which device and stream are current), the allocator, and the kernels. Creation, copies and views have kernels
// of their own. Every other operation runs on the CPU, in the same memory, after the check that CUDA's own kernels
// make: that all tensors are on one device.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <unordered_set>

namespace {

using at::Tensor;

const c10::Device the_device(c10::DeviceType::CUDA, 0);
const c10::Stream the_stream(c10::Stream::DEFAULT, the_device);

// ---- the current device and stream

struct Guard final : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return the_device; }
  c10::Device getDevice() const override { return the_device; }
  c10::Stream getStream(c10::Device) const noexcept override { return the_stream; }
  c10::Stream getDefaultStream(c10::Device) const override { return the_stream; }
  c10::Stream getNewStream(c10::Device, int = 0) const override { return the_stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return the_stream; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = nullptr;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---- memory

struct HostMemory final : public c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = nullptr;
    if (size && posix_memalign(&data, 256, size)) throw std::bad_alloc();
    return {data, data, &std::free, the_device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};
HostMemory memory;
REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &memory)

// ---- random numbers: those of a CPU, so that a run on this device draws the same ones

struct Generator final : public at::CPUGeneratorImpl {
  explicit Generator(uint64_t seed) : at::CPUGeneratorImpl(seed) { device_ = the_device; }
};

const at::Generator& default_generator() {
  static const at::Generator generator = at::make_generator<Generator>(c10::default_rng_seed_val);
  return generator;
}

// ---- is there a GPU

struct Hooks final : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool hasCUDA() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>(c10::default_rng_seed_val);
  }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)

// ---- creation and copies

using Dtype = std::optional<at::ScalarType>;

Tensor empty(c10::IntArrayRef size, Dtype dtype, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, Dtype dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

// A CPU tensor in the same memory.
Tensor host(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().is_cpu()) return tensor;
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

Tensor& copy_(Tensor& self, const Tensor& from, bool) {
  if (self.numel()) host(self).copy_(host(from));
  return self;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (to.numel()) host(to).copy_(host(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& self) { return at::_local_scalar_dense(host(self)); }

// Of integers, too, which a CPU's kernel does not take.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  const auto counts = at::histc(host(self).to(at::kDouble), bins, min, max);
  return counts.to(self.options());
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                 double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  auto added = mask;
  if (mask.has_value() && mask->scalar_type() == at::kBool) {
    added = at::zeros(mask->sizes(), query.options()).masked_fill_(mask->logical_not(), -INFINITY);
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, added, dropout, is_causal,
                                                            std::nullopt, scale, enable_gqa));
}

// ---- all other operations

// Names, with their overloads, of operations that take a CPU tensor of no dimensions as a number.
std::unordered_set<std::string> take_scalars;

// CUDA's own check. Operations that take numbers from the CPU are marked in torch's list of operations; indexing alone
// takes whole index tensors from there, for a tensor on the device.
void require_one_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto name = schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
  const bool takes_scalars = take_scalars.count(name);
  const bool is_indexing = name.rfind("aten::index.", 0) == 0 || name.rfind("aten::index_put", 0) == 0 ||
                           name.rfind("aten::_index_put", 0) == 0 || name.rfind("aten::_unsafe_index", 0) == 0;
  const auto first = stack.size() - arguments.size();
  const auto refuse = [&](const std::string& argument) {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but got ", argument,
                " is on cpu, different from other tensors on cuda:0 (when checking argument in method wrapper_CUDA_",
                name, ")");
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = stack[first + i];
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      if (!tensor.defined() || !tensor.device().is_cpu() || (takes_scalars && tensor.dim() == 0)) continue;
      refuse(arguments[i].name());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      if (is_indexing && stack[first].toTensor().is_cuda()) continue;
      for (const c10::IValue& element : value.toListRef()) {
        if (!element.isTensor()) continue;
        const auto& tensor = element.toTensor();
        if (tensor.defined() && tensor.device().is_cpu()) refuse(arguments[i].name());
      }
    }
  }
}

// A tensor on the device with the values of one on the CPU.
Tensor device(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  const Tensor made =
      at::detail::empty_strided_generic(tensor.sizes(), tensor.strides(), &memory, keys, tensor.scalar_type());
  return copy_from(tensor, made, false);
}

using Tensors = std::vector<Tensor>;

Tensors map(const Tensors& tensors, Tensor (*of)(const Tensor&)) {
  Tensors found;
  for (const Tensor& tensor : tensors) found.push_back(of(tensor));
  return found;
}

// Whether an argument may get another size: operations give results of unknown size a tensor of no elements.
bool may_grow(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = stack[stack.size() - arguments.size() + i];
    const bool is_written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    if (is_written && value.isTensor() && !value.toTensor().numel()) return true;
  }
  return false;
}

// Runs an operation on CPU tensors in the memory of its arguments, and copies new results to the device.
void run_in_place(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto given = torch::jit::pop(*stack, schema.arguments().size());
  bool is_on_device = false;
  for (const auto& value : given) {
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      is_on_device |= tensor.defined() && tensor.is_cuda();
      stack->emplace_back(host(tensor));
    } else if (value.isTensorList()) {
      const auto tensors = value.toTensorVector();
      for (const Tensor& tensor : tensors) is_on_device |= tensor.is_cuda();
      stack->emplace_back(map(tensors, host));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> on_host;
      for (const c10::IValue& element : value.toListRef()) {
        on_host.push_back(element.isTensor() ? std::make_optional(host(element.toTensor())) : std::nullopt);
      }
      stack->emplace_back(on_host);
    } else if (value.isDevice()) {
      is_on_device |= value.toDevice().is_cuda();
      stack->emplace_back(c10::Device(at::kCPU));
    } else {
      stack->push_back(value);
    }
  }
  op.callBoxed(stack);
  const auto results = torch::jit::pop(*stack, schema.returns().size());
  for (size_t i = 0; i < results.size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    if (alias) {
      TORCH_CHECK(alias->isWrite(), schema.name(), " returns a view, for which the simulated device has no kernel");
      const auto of = std::find_if(schema.arguments().begin(), schema.arguments().end(), [&](const auto& argument) {
        return argument.alias_info() && *argument.alias_info() == *alias;
      });
      stack->push_back(given[of - schema.arguments().begin()]);
    } else if (is_on_device && results[i].isTensor()) {
      stack->emplace_back(device(results[i].toTensor()));
    } else if (is_on_device && results[i].isTensorList()) {
      stack->emplace_back(map(results[i].toTensorVector(), device));
    } else {
      stack->push_back(results[i]);
    }
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  require_one_device(op, *stack);
  std::vector<std::pair<at::Generator, at::Generator>> generators;  // the device's, and the CPU's that draws for it
  for (auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (!value.isGenerator() || value.toGenerator().device().is_cpu()) continue;
    const auto on_cpu = at::make_generator<at::CPUGeneratorImpl>();
    on_cpu.unsafeGetGeneratorImpl()->set_state(*value.toGenerator().unsafeGetGeneratorImpl()->get_state());
    generators.emplace_back(value.toGenerator(), on_cpu);
    const_cast<c10::IValue&>(value) = on_cpu;
  }
  if (may_grow(op, *stack)) {
    at::native::cpu_fallback(op, stack);
  } else {
    run_in_place(op, stack);
  }
  for (const auto& [of_device, on_cpu] : generators) {
    of_device.unsafeGetGeneratorImpl()->set_state(*on_cpu.unsafeGetGeneratorImpl()->get_state());
  }
}

}  // namespace

extern "C" void simulated_device_take_scalars(const char* names) {
  std::istringstream words(names);
  for (std::string name; words >> name;) take_scalars.insert("aten::" + name);
}

static torch::CppFunction on_cpu() { return torch::CppFunction::makeFromBoxedFunction<&fallback>(); }

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(on_cpu()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("resize_", at::native::resize_);
  library.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("histc", histc);
  library.impl("scaled_dot_product_attention", attention);
  // for these torch would choose among kernels that only CUDA has
  library.impl("convolution", on_cpu());
  library.impl("convolution_backward", on_cpu());
}

// The choice among CUDA's fused kernels would look for them; this one is made of operations, with their gradients.
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { library.impl("scaled_dot_product_attention", attention); }
