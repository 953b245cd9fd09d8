// Each hook of PyTorch's C++ API, registered on a tensor or a node of a Python program.
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

using at::Tensor;
using namespace torch::autograd;

namespace {
std::vector<std::string> lines;  // in the order in which the hooks ran

void note(const char* hook, const Tensor& grad) {
  lines.push_back(std::string(hook) + ": " + std::to_string(grad.sum().item<float>()).substr(0, 4));
}

struct Pre : FunctionPreHook {
  variable_list operator()(const variable_list& grads) override {
    note("node pre hook, gradient of its output", grads[0]);
    return {grads[0].mul(2)};
  }
};

struct Post : FunctionPostHook {
  variable_list operator()(const variable_list& grad_inputs, const variable_list&) override {
    note("node post hook, gradient of its input", grad_inputs[0]);
    return grad_inputs;
  }
};

struct PostAccumulate : PostAccumulateGradHook {
  void operator()(const Tensor& leaf) override {
    note("post-accumulate hook, .grad", leaf.grad());
  }
};

using Capture = GraphTask::ExecInfo::Capture;

struct Captured : Capture::GradCaptureHook {
  Tensor operator()(const Tensor& grad) override {
    note("capture hook, result of autograd.grad", grad);
    return grad.mul(10);
  }
};

unsigned add_tensor_hook(const Tensor& tensor, bool queues, const Tensor& captured) {
  return tensor.register_hook([queues, captured](const Tensor& grad) {
    note("Tensor::register_hook, gradient", grad);
    if (queues) {
      auto done = [] { lines.push_back("callback: the backward pass has ended"); };
      Engine::get_default_engine().queue_callback(done);
    }
    if (captured.defined()) {  // the node whose gradient autograd.grad returns
      auto* info = const_cast<std::unordered_map<Node*, GraphTask::ExecInfo>*>(
          get_current_graph_task_exec_info());
      for (auto& capture : *info->at(impl::gradient_edge(captured).function.get()).captures_)
        capture.DO_NOT_USE_DEPRECATED_register_capture_hook(std::make_unique<Captured>());
    }
    return grad.mul(3);
  });
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("take_lines", [] { return std::exchange(lines, {}); });
  m.def("add_tensor_hook", [](const Tensor& tensor) { return add_tensor_hook(tensor, false, {}); });
  m.def("add_queueing_hook", [](const Tensor& tensor) { return add_tensor_hook(tensor, true, {}); });
  m.def("add_capturing_hook", [](const Tensor& tensor, const Tensor& captured) {
    return add_tensor_hook(tensor, false, captured);
  });
  m.def("remove_tensor_hook", [](const Tensor& tensor, unsigned key) { tensor.remove_hook(key); });
  m.def("add_pre_hook", [](const Tensor& tensor) {
    tensor.grad_fn()->add_pre_hook(std::make_unique<Pre>());
  });
  m.def("remove_pre_hook", [](const Tensor& tensor) { tensor.grad_fn()->pre_hooks().pop_back(); });
  m.def("add_post_hook", [](const Tensor& tensor) {
    return tensor.grad_fn()->add_post_hook(std::make_unique<Post>());
  });
  m.def("remove_post_hook", [](const Tensor& tensor, uintptr_t key) {
    return tensor.grad_fn()->del_post_hook(key);
  });
  m.def("set_post_accumulate_hook", [](const Tensor& leaf, bool on) {
    impl::set_post_acc_grad_hooks(leaf, on ? std::make_unique<PostAccumulate>() : nullptr);
  });
}
