// A device for tests: memory of the CPU behind the device rules of CUDA.
//
// Every operator runs on the CPU, on tensors that share the memory of those on the device. Before that, its arguments
// are checked as CUDA would check them; whatever makes the host wait, and every kernel that would be launched, is told
// to a listener. Memory that nobody has written is not a number. There are two devices.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_copy_from_native.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>

namespace {

constexpr auto kStrict = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;

// How an operator of CUDA treats tensors on different devices; the numbers are those of `rules.py`.
enum Rule : int { kSameDevice = 0, kCpuScalars = 1, kUnchecked = 2, kNoKernel = 3 };

std::unordered_map<std::string, int> rules;
thread_local c10::DeviceIndex current_device = 0;
py::function* listener = nullptr;
std::atomic<bool> listening{false};

void tell(const char* kind, const std::string& what) {
  if (!listening) return;
  py::gil_scoped_acquire acquired;
  if (listener != nullptr) (*listener)(kind, what);
}

// ---- memory

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetAllocator(at::kCPU)->raw_allocate(bytes);
    if (bytes > 0) std::memset(data, 0xff, bytes);
    return {data, data, &release, c10::Device(kStrict, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  static void release(void* data) { c10::GetAllocator(at::kCPU)->raw_deallocate(data); }
};
Allocator allocator;
REGISTER_ALLOCATOR(kStrict, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kStrict; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kStrict, current_device}; }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { tell("wait", "synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { tell("wait", "synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = c10::Device(kStrict, index < 0 ? current_device : index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current_device, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static std::array<at::Generator, kDevices> all{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
    return all.at(index < 0 ? current_device : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return at::make_generator<Generator>(index); }
  at::Device getDeviceFromPtr(void*) const override { return {kStrict, current_device}; }
};

// ---- views of the same memory

// Keeps what owns the memory alive.
struct Owner {
  c10::Storage storage;
};
c10::DataPtr share(const c10::Storage& storage, c10::Device device) {
  return {storage.mutable_data(), new Owner{storage}, [](void* owner) { delete static_cast<Owner*>(owner); }, device};
}

at::Tensor as_tensor(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* implementation = made.unsafeGetTensorImpl();
  implementation->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) implementation->set_wrapped_number(true);
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

// A tensor on the CPU that was made there, as one on a device.
at::Tensor onto(const at::Tensor& made, c10::Device device) {
  auto bytes = made.storage().nbytes();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, share(made.storage(), device), &allocator, true);
  return as_tensor(std::move(storage), made, c10::DispatchKey::PrivateUse1);
}

// The tensors of one call: on the device, and the same memory on the CPU.
struct Shared {
  std::unordered_map<c10::StorageImpl*, c10::Storage> on_cpu;
  std::unordered_map<c10::StorageImpl*, c10::Storage> on_device;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  std::optional<c10::Device> device;

  at::Tensor cpu(const at::Tensor& given, bool is_written) {
    if (!given.defined() || given.device().type() != kStrict) return given;
    if (!device) device = given.device();
    auto* key = given.storage().unsafeGetStorageImpl();
    auto found = on_cpu.find(key);
    if (found == on_cpu.end()) {
      c10::Storage made(
          c10::Storage::use_byte_size_t(), given.storage().nbytes(), share(given.storage(), at::kCPU),
          c10::GetAllocator(at::kCPU), true);
      on_device.emplace(made.unsafeGetStorageImpl(), given.storage());
      found = on_cpu.emplace(key, std::move(made)).first;
    }
    auto made = as_tensor(found->second, given, c10::DispatchKey::CPU);
    if (is_written) written.emplace_back(given, made);
    return made;
  }

  // What an operator returned.
  at::Tensor back(const at::Tensor& returned, c10::Device fallback) {
    if (!returned.defined()) return returned;
    for (auto& [original, alias] : written)
      if (alias.is_same(returned)) return original;
    auto found = on_device.find(returned.storage().unsafeGetStorageImpl());
    if (found != on_device.end()) return as_tensor(found->second, returned, c10::DispatchKey::PrivateUse1);
    return onto(returned, device.value_or(fallback));
  }

  // An operator may have given what it writes to another size.
  void settle() {
    for (auto& [original, alias] : written) {
      if (original.sizes() == alias.sizes() && original.strides() == alias.strides() &&
          original.storage().nbytes() == alias.storage().nbytes())
        continue;
      auto* storage = original.storage().unsafeGetStorageImpl();
      if (storage->data() != alias.storage().data()) {
        storage->set_data_ptr_noswap(share(alias.storage(), original.device()));
        storage->set_nbytes(alias.storage().nbytes());
      }
      original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }
};

// ---- the rules of CUDA

bool is_matrix_product(const std::string& name) {
  for (const char* one : {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::dot"})
    if (name == one) return true;
  return false;
}

void check(const std::string& name, int rule, const std::vector<std::pair<at::Tensor, bool>>& tensors) {
  TORCH_CHECK_NOT_IMPLEMENTED(rule != kNoKernel, name, " has no kernel for CUDA");
  std::optional<c10::Device> common;
  if (rule == kCpuScalars)
    for (auto& [one, _] : tensors)
      if (one.defined() && !one.is_cpu() && !common) common = one.device();
  int scalars = 0;
  for (auto& [one, is_written] : tensors) {
    if (!one.defined() || rule == kUnchecked) continue;
    if (!common) common = one.device();
    if (one.device() == *common) continue;
    if (rule == kCpuScalars && one.is_cpu() && one.dim() == 0 && !is_written && ++scalars == 1) continue;
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, ", *common, " and ",
        one.device(), " (", name, ")");
  }
}

void check_indices(const at::Tensor& self, const c10::List<std::optional<at::Tensor>>& indices, const std::string& name) {
  for (const std::optional<at::Tensor>& one : indices) {
    if (!one || !one->defined()) continue;
    TORCH_CHECK(
        one->is_cpu() || one->device() == self.device(),
        "indices should be either on cpu or on the same device as the indexed tensor (", self.device(), ")");
    if (one->is_cpu()) tell("wait", name + " with an index on the CPU");
    if (one->scalar_type() == at::kBool || one->scalar_type() == at::kByte) tell("wait", name + " with a mask");
  }
}

bool makes_the_host_wait(const std::string& name, const torch::jit::Stack& stack, size_t begin) {
  for (const char* one :
       {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
        "aten::equal", "aten::is_set_to", "aten::bincount", "aten::histc", "aten::_linalg_check_errors"})
    if (name == one) return true;
  if (name == "aten::repeat_interleave") return stack.at(begin + 1).isNone();
  return false;
}

// ---- any operator

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto full = schema.overload_name().empty() ? name : name + "." + schema.overload_name();
  auto rule = rules.find(full);
  TORCH_CHECK_NOT_IMPLEMENTED(rule != rules.end(), full, " has no kernel for CUDA");

  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  std::vector<std::pair<at::Tensor, bool>> tensors;
  auto written = [&](size_t i) {
    const auto* alias = schema.arguments()[i].alias_info();
    return alias != nullptr && alias->isWrite();
  };
  for (size_t i = 0; i < count; ++i) {
    const auto& value = stack->at(begin + i);
    if (value.isTensor()) {
      tensors.emplace_back(value.toTensor(), written(i));
    } else if (value.isTensorList()) {
      for (const at::Tensor& one : value.toTensorList()) tensors.emplace_back(one, written(i));
    } else if (value.isOptionalTensorList() && rule->second != kCpuScalars) {
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorList())
        if (one) tensors.emplace_back(*one, false);
    } else if (value.isOptionalTensorList()) {
      check_indices(stack->at(begin).toTensor(), value.toOptionalTensorList(), full);
    }
  }
  check(full, rule->second, tensors);
  if (is_matrix_product(name) && !tensors.empty())
    TORCH_CHECK_NOT_IMPLEMENTED(
        !at::isIntegralType(tensors[0].first.scalar_type(), true), "\"", full, "\" not implemented for integers");
  if (makes_the_host_wait(name, *stack, begin)) tell("wait", full);

  Shared shared;
  c10::Device target(kStrict, current_device);
  for (size_t i = 0; i < count; ++i) {
    auto& value = stack->at(begin + i);
    if (value.isTensor()) {
      value = shared.cpu(value.toTensor(), written(i));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& one : value.toTensorList()) all.push_back(shared.cpu(one, written(i)));
      value = std::move(all);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorList())
        all.push_back(one ? std::optional<at::Tensor>(shared.cpu(*one, false)) : std::nullopt);
      value = std::move(all);
    } else if (value.isDevice()) {
      if (value.toDevice().type() == kStrict) {
        target = value.toDevice().has_index() ? value.toDevice() : target;
        value = c10::Device(at::kCPU);
      }
    } else if (value.isGenerator()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(
          !generator.defined() || generator.device().type() == kStrict,
          "Expected a 'strict' device type for generator but found '", generator.device().type(), "'");
      // It is a generator of the CPU but for its device, and the kernels of the CPU ask for that.
      if (generator.defined()) {
        auto copied = at::make_generator<at::CPUGeneratorImpl>(generator.current_seed());
        copied.set_state(generator.get_state());
        generator.set_current_seed(generator.current_seed() + 1);
        value = copied;
      }
    }
  }
  {
    c10::OptionalDeviceGuard guard(shared.device);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  shared.settle();

  bool made = schema.returns().empty() || !shared.written.empty();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = stack->at(i);
    if (value.isTensor()) {
      auto returned = value.toTensor();
      auto result = shared.back(returned, target);
      made |= result.defined() && !shared.on_device.count(returned.storage().unsafeGetStorageImpl());
      value = std::move(result);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& one : value.toTensorList()) {
        made |= !shared.on_device.count(one.storage().unsafeGetStorageImpl());
        all.push_back(shared.back(one, target));
      }
      value = std::move(all);
    }
  }
  // A view launches nothing.
  if (made) tell("launch", full);
}

// ---- what makes tensors, and copies

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  // Without pinned memory the host waits for a copy in either direction, whatever is asked for.
  if (from.is_cpu()) tell("wait", "copy to the device");
  if (to.is_cpu()) tell("wait", "copy to the host");
  tell("launch", "copy");
  Shared shared;
  shared.cpu(to, true).copy_(shared.cpu(from, false));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  tell("wait", "item");
  Shared shared;
  return at::_local_scalar_dense(shared.cpu(self, false));
}

at::Tensor& set_source(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* implementation = self.unsafeGetTensorImpl();
  implementation->set_storage_keep_dtype(std::move(source));
  implementation->set_storage_offset(offset.expect_int());
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !sizes.empty()) {
    implementation->set_sizes_contiguous(sizes);
  } else {
    implementation->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_source(self, std::move(source), 0, c10::SymIntArrayRef{c10::SymInt(count)}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  std::vector<std::pair<at::Tensor, bool>> given{{input, false}, {weight, false}};
  if (bias && bias->defined()) given.emplace_back(*bias, false);
  check("aten::convolution", kSameDevice, given);
  tell("launch", "convolution");
  Shared shared;
  std::optional<at::Tensor> own_bias;
  if (bias && bias->defined()) own_bias = shared.cpu(*bias, false);
  auto made = at::convolution_symint(
      shared.cpu(input, false), shared.cpu(weight, false), own_bias, stride, padding, dilation, transposed,
      output_padding, groups);
  return onto(made, input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> wanted) {
  check("aten::convolution_backward", kSameDevice, {{gradient, false}, {input, false}, {weight, false}});
  tell("launch", "convolution_backward");
  Shared shared;
  std::vector<c10::SymInt> bias_sizes{gradient.sym_size(1)};
  auto made = at::convolution_backward_symint(
      shared.cpu(gradient, false), shared.cpu(input, false), shared.cpu(weight, false),
      at::OptionalSymIntArrayRef(bias_sizes), stride, padding, dilation, transposed, output_padding, groups, wanted);
  auto move = [&](const at::Tensor& one) { return one.defined() ? onto(one, input.device()) : one; };
  return {move(std::get<0>(made)), move(std::get<1>(made)), move(std::get<2>(made))};
}

int64_t fused_sdp_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_fused_sdp_choice", fused_sdp_choice);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

// A copy resolves what is conjugated or negated only when it is read.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// The lists of CUDA.
namespace at {
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#define FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FLOAT)
#define SET_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTE)
}
}  // namespace at

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(new Hooks()); });
  m.def("set_rules", [](std::unordered_map<std::string, int> given) { rules = std::move(given); });
  m.def("listen", [](py::object given) {
    delete std::exchange(listener, given.is_none() ? nullptr : new py::function(std::move(given)));
    listening = listener != nullptr;
  });
  m.def("current_device", [] { return static_cast<int>(current_device); });
  m.def("set_device", [](int index) { current_device = static_cast<c10::DeviceIndex>(index); });
  m.def("default_generator", [](int index) { return at::globalContext().defaultGenerator(c10::Device(kStrict, index)); });
}
