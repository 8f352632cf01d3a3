// Runs operators on CUDA tensors by the CPU's kernel, on the same memory: that of the fake device is the host's.
//
// For each call, a CUDA tensor gets an alias: a CPU tensor over the same bytes. Results that are aliases, or views of them,
// become the CUDA tensors again; new results are copied into new CUDA memory. While a graph is captured, calls are kept with
// their tensors; a launch of the graph makes them again, and results go where the first ones are.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <Python.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

using c10::IValue;

extern "C" int fake_cuda_current_device();

class Call {
 public:
  IValue to_cpu(const IValue& value) {
    if (value.isTensor()) return alias(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(alias(tensor));
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (value.toDevice().has_index()) device_ = value.toDevice().index();
      return at::Device(at::kCPU);
    }
    if (value.isGenerator()) return value.toGenerator().device().is_cuda() ? IValue() : value;
    if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) return optional(value);
    return value;
  }

  IValue to_cuda(const IValue& value) {
    if (value.isTensor()) return original(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(original(tensor));
      return list;
    }
    return value;
  }

  // Carry over what the operator did to an alias: another shape, or other memory.
  void settle() {
    for (auto& [cuda, cpu] : pairs_) {
      bool moved = cpu.numel() && cpu.const_data_ptr() != cuda.const_data_ptr();
      if (cpu.sizes() == cuda.sizes() && cpu.strides() == cuda.strides() && !moved) continue;
      at::AutoDispatchBelowADInplaceOrView guard;
      if (cpu.sizes() != cuda.sizes()) cuda.resize_(cpu.sizes());
      if (cpu.strides() != cuda.strides()) cuda.as_strided_(cpu.sizes(), cpu.strides(), cpu.storage_offset());
      if (!moved || !cpu.numel()) continue;
      size_t bytes = std::min(cuda.storage().nbytes(), cpu.storage().nbytes());
      std::memcpy(cuda.mutable_data_ptr(), cpu.const_data_ptr(), bytes - cpu.storage_offset() * cpu.element_size());
    }
  }

  bool had_cuda() const { return !pairs_.empty(); }

 private:
  at::Tensor alias(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(key);
    if (found == storages_.end()) {
      c10::DataPtr data(tensor.storage().mutable_data(), nullptr, [](void*) {}, at::kCPU);
      c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                                 tensor.storage().nbytes(), std::move(data),
                                                                 c10::GetCPUAllocator(), /*resizable=*/true));
      found = storages_.emplace(key, storage).first;
      owners_.emplace(storage.unsafeGetStorageImpl(), tensor);
    }
    auto cpu = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    cpu.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.is_conj()) cpu._set_conj(true);
    if (tensor.is_neg()) cpu._set_neg(true);
    if (pairs_.empty()) device_ = tensor.device().index();
    pairs_.emplace_back(tensor, cpu);
    return cpu;
  }

  IValue optional(const IValue& value) {
    auto list = value.toList();
    auto copy = c10::impl::GenericList(list.elementType());
    for (size_t i = 0; i < list.size(); i++) {
      IValue element = list.get(i);
      copy.push_back(element.isTensor() ? IValue(alias(element.toTensor())) : element);
    }
    return copy;
  }

  at::Tensor original(const at::Tensor& result) {
    if (!result.defined() || result.is_cuda()) return result;
    for (auto& [cuda, cpu] : pairs_)
      if (cpu.unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) return cuda;
    at::AutoDispatchBelowADInplaceOrView guard;
    auto owner = owners_.find(result.storage().unsafeGetStorageImpl());
    if (owner != owners_.end()) {
      auto view = at::empty({0}, result.options().device(at::kCUDA));
      view.set_(owner->second.storage(), result.storage_offset(), result.sizes(), result.strides());
      return view;
    }
    auto options = result.options().device(at::Device(at::kCUDA, device_)).pinned_memory(false);
    auto copy = at::empty_strided(result.sizes(), result.strides(), options);
    if (result.numel()) {
      size_t start = result.storage_offset() * result.element_size();
      std::memcpy(copy.mutable_data_ptr(), static_cast<const char*>(result.storage().data()) + start,
                  std::min(copy.storage().nbytes(), result.storage().nbytes() - start));
    }
    return copy;
  }

  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;  // a CUDA storage to its alias
  std::unordered_map<c10::StorageImpl*, at::Tensor> owners_;      // an alias to a CUDA tensor on the same storage
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;          // CUDA tensors and their aliases
  c10::DeviceIndex device_ = fake_cuda_current_device();          // of new results
};

// On the stack: arguments before, results after.
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t arguments = schema.arguments().size(), returns = schema.returns().size();
  Call call;
  bool onto_cuda = false;
  for (size_t i = 0; i < arguments; i++) {
    IValue& value = (*stack)[stack->size() - arguments + i];
    onto_cuda |= value.isDevice() && value.toDevice().is_cuda();
    value = schema.arguments()[i].name() == "pin_memory" ? IValue() : call.to_cpu(value);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.settle();
  if (!onto_cuda && !call.had_cuda()) return;
  for (size_t i = 0; i < returns; i++) {
    IValue& value = (*stack)[stack->size() - returns + i];
    value = call.to_cuda(value);
  }
}

extern "C" unsigned long long fake_cuda_capturing();
extern "C" void fake_cuda_on_graph(void (*on_launch)(unsigned long long), void (*on_destroy)(unsigned long long));

// One call of a captured graph: of an operator, or of Python (a stand-in, a kernel in Triton's interpreter).
struct Node {
  std::optional<c10::OperatorHandle> op;
  std::vector<IValue> arguments, results;
  PyObject* python = nullptr;
};
std::map<unsigned long long, std::vector<Node>> graphs;
thread_local int suspended = 0;  // inside a call that is kept as a whole, or a replay

std::vector<Node>* recording() {
  auto id = suspended ? 0 : fake_cuda_capturing();
  return id ? &graphs[id] : nullptr;
}

void copy_result(const c10::OperatorHandle& op, const IValue& from, const IValue& to) {
  if (to.isTensorList()) {
    auto fresh = from.toTensorVector(), kept = to.toTensorVector();
    for (size_t i = 0; i < kept.size(); i++) copy_result(op, fresh[i], kept[i]);
  }
  if (!to.isTensor() || !to.toTensor().defined()) return;
  at::Tensor fresh = from.toTensor(), kept = to.toTensor();
  TORCH_CHECK(fresh.sizes() == kept.sizes(), "fake cuda: ", op.schema().name(), " of a graph gave another shape");
  if (fresh.numel() && fresh.const_data_ptr() != kept.const_data_ptr()) kept.copy_(fresh);
}

void replay(unsigned long long id) {
  suspended++;
  for (Node& node : graphs[id]) {
    if (node.python) {
      auto gil = PyGILState_Ensure();
      PyObject* result = PyObject_CallNoArgs(node.python);
      if (!result) PyErr_Print(), std::abort();
      Py_DECREF(result);
      PyGILState_Release(gil);
      continue;
    }
    torch::jit::Stack stack(node.arguments);
    run(*node.op, &stack);
    for (size_t i = 0; i < stack.size(); i++) copy_result(*node.op, stack[i], node.results[i]);
  }
  suspended--;
}

void forget(unsigned long long id) { graphs.erase(id); }

void redirect(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  auto* nodes = recording();
  if (!nodes) return run(op, stack);
  const std::string& name = op.schema().name();
  TORCH_CHECK(name != "aten::_local_scalar_dense" && name != "aten::nonzero",
              "fake cuda: ", name, " waits for the device, which is not permitted while a graph is captured");
  Node node{op, torch::jit::last(*stack, op.schema().arguments().size()).vec()};
  run(op, stack);
  node.results = torch::jit::last(*stack, op.schema().returns().size()).vec();
  nodes->push_back(std::move(node));
}

// These need no kernel: torch's own work on the device's memory as it is.
const std::unordered_set<std::string> kept = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::as_strided", "aten::as_strided_", "aten::view",
    "aten::_reshape_alias", "aten::unfold", "aten::view_as_real", "aten::view_as_complex", "aten::resize_",
    "aten::set_", "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor",
    "aten::record_stream", "aten::_pin_memory", "aten::is_pinned", "aten::_efficientzerotensor"};

// Returns the number of operators that are redirected, and the names of those that only CUDA has.
PyObject* install(PyObject*, PyObject*) {
  static std::vector<std::unique_ptr<torch::Library>> libraries;
  auto& dispatcher = c10::Dispatcher::singleton();
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  long redirected = 0;
  PyObject* cuda_only = PyList_New(0);
  for (auto& name : dispatcher.getAllOpNames()) {
    std::string full = c10::toString(name);
    auto op = dispatcher.findOp(name);
    if (full.rfind("aten::", 0) != 0 || kept.count(full) || !op || !op->hasSchema()) continue;
    bool copies = full == "aten::copy_";  // it has one kernel for all devices
    if (!copies && !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    if (!copies && !op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
      PyObject* text = PyUnicode_FromString(full.c_str());
      PyList_Append(cuda_only, text);
      Py_DECREF(text);
      continue;
    }
    library->impl(full.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&redirect>());
    redirected++;
  }
  libraries.push_back(std::move(library));
  fake_cuda_on_graph(&replay, &forget);
  return Py_BuildValue("lN", redirected, cuda_only);
}

// begin(): whether a graph is captured; then nothing is kept until end(again), which keeps `again` for replays unless it is None.
PyObject* begin(PyObject*, PyObject*) {
  if (!recording()) Py_RETURN_FALSE;
  suspended++;
  Py_RETURN_TRUE;
}
PyObject* end(PyObject*, PyObject* again) {
  suspended--;
  if (again != Py_None) {
    Py_INCREF(again);
    recording()->push_back(Node{std::nullopt, {}, {}, again});
  }
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"install", install, METH_NOARGS, ""},
                         {"begin", begin, METH_NOARGS, ""},
                         {"end", end, METH_O, ""},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "fake_cuda_redirect", "", -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_fake_cuda_redirect(void) { return PyModule_Create(&module); }
