// Compiles graphs and runs them on tensors that the caller owns.
#ifndef INGOT_PROGRAM_HPP_
#define INGOT_PROGRAM_HPP_

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ingot/error.hpp"
#include "ingot/graph.hpp"

namespace ingot {
inline namespace api {

// A tensor in the caller's memory, over [batch, rows, groups, features]; strides in elements.
using Tensor = ingot_tensor;

inline Tensor tensor(void* data, DataType dtype, const Shape& shape, int64_t batch,
                     int32_t device = -1) {
  const int64_t groups = shape.groups * shape.features, rows = shape.rows * groups;
  return {data,
          {shape.batched ? batch : 1, shape.rows, shape.groups, shape.features},
          {rows, groups, shape.features, 1},
          static_cast<int32_t>(dtype),
          device};
}

namespace detail {
template <class T>
constexpr DataType data_type();
template <>
constexpr DataType data_type<float>() {
  return DataType::f32;
}
template <>
constexpr DataType data_type<double>() {
  return DataType::f64;
}
template <>
constexpr DataType data_type<int64_t>() {
  return DataType::i64;
}

struct Free {
  void operator()(void* pointer) const { std::free(pointer); }
};
struct FreeText {
  void operator()(char* text) const { ingot_free(text); }
};

inline std::string take(char* text) {
  const std::unique_ptr<char, FreeText> owned(text);
  return owned ? std::string(owned.get()) : std::string();
}
}  // namespace detail

// A contiguous host tensor over a vector, whose size must be the shape's.
template <class T>
Tensor host(std::vector<T>& data, const Shape& shape, int64_t batch = 1) {
  const int64_t count = (shape.batched ? batch : 1) * shape.rows * shape.groups * shape.features;
  if (static_cast<int64_t>(data.size()) != count) {
    throw Error(INGOT_INVALID_ARGUMENT, "a tensor of " + std::to_string(count) +
                                            " elements over a vector of " +
                                            std::to_string(data.size()));
  }
  return tensor(data.data(), detail::data_type<T>(), shape, batch);
}

// By the names of the graph's leaves and results.
using Bindings = std::map<std::string, Tensor>;

struct Target {
  std::string device = "cpu";          // or "cuda"
  std::string precision = "fp32";      // "ieee", "high", "tf32", "bf16", "fp16"
  std::string rewrite_level = "ieee";  // or "real": equal in real arithmetic only
  std::string cache_dir = {};          // empty: this user's default
  int sm = 90;                         // compute capability to plan for where no GPU is present

  std::string json() const {
    std::string out =
        "{\"device\": " + detail::quoted(device) + ", \"precision\": " + detail::quoted(precision) +
        ", \"rewrite_level\": " + detail::quoted(rewrite_level) + ", \"sm\": " + std::to_string(sm);
    if (!cache_dir.empty()) out += ", \"cache_dir\": " + detail::quoted(cache_dir);
    return out + "}";
  }
};

namespace detail {

// What a graph binds, kept when the graph is gone.
struct Signature {
  std::string graph_name;
  std::vector<std::string> names;  // leaves, then results
  std::vector<bool> leaf_batched;

  explicit Signature(const Graph& graph)
      : graph_name(graph.name()), names(graph.leaf_names()), leaf_batched(graph.leaf_batched()) {
    names.insert(names.end(), graph.result_names().begin(), graph.result_names().end());
  }

  std::vector<Tensor> arrange(const Bindings& bindings) const {
    std::vector<Tensor> tensors;
    for (const std::string& name : names) {
      const auto found = bindings.find(name);
      if (found == bindings.end()) {
        throw Error(INGOT_INVALID_ARGUMENT, graph_name + ": nothing is bound to '" + name + "'");
      }
      tensors.push_back(found->second);
    }
    if (tensors.size() != bindings.size()) {
      for (const auto& [name, tensor] : bindings) {
        if (std::find(names.begin(), names.end(), name) == names.end()) {
          throw Error(INGOT_INVALID_ARGUMENT, graph_name + " has no leaf or result '" + name + "'");
        }
      }
    }
    return tensors;
  }

  // The extent that all batched leaves share; 1 where there is none.
  int64_t batch(const std::vector<Tensor>& tensors) const {
    int64_t batch = -1;
    for (size_t i = 0; i < leaf_batched.size(); ++i) {
      if (!leaf_batched[i]) continue;
      if (batch >= 0 && tensors[i].sizes[0] != batch) {
        throw Error(INGOT_INVALID_ARGUMENT, graph_name + ": '" + names[i] + "' has batch size " +
                                                std::to_string(tensors[i].sizes[0]) +
                                                ", another leaf " + std::to_string(batch));
      }
      batch = tensors[i].sizes[0];
    }
    return batch < 0 ? 1 : batch;
  }
};

}  // namespace detail

// A compiled graph. May be used from several threads and streams at once.
class Program {
 public:
  Program(const Graph& graph, const Target& target) : signature_(graph) {
    ingot_program* program = nullptr;
    check(ingot_program_create(graph.json().c_str(), target.json().c_str(), &program));
    program_.reset(program);
  }

  // Compiles and loads all that runs with this batch size need; device: -1 for the host.
  void prepare(int64_t batch, int device = -1) {
    check(ingot_program_prepare(program_.get(), batch, device));
  }
  // What a run with dense tensors takes; prepare(bindings) says what others do.
  size_t workspace_size(int64_t batch) const {
    size_t bytes = 0;
    check(ingot_program_workspace_size(program_.get(), batch, &bytes));
    return bytes;
  }

  // Prepares runs with tensors laid out like these, whatever their strides, and gives the bytes of
  // workspace that they take.
  size_t prepare(const Bindings& bindings) {
    const std::vector<Tensor> tensors = signature_.arrange(bindings);
    size_t bytes = 0;
    check(ingot_program_prepare_call(program_.get(), signature_.batch(tensors), tensors.data(),
                                     static_cast<int>(tensors.size()), &bytes));
    return bytes;
  }

  // Runs with the caller's workspace (256-byte aligned, in the device's memory) on a CUstream.
  void run(const Bindings& bindings, void* workspace, size_t workspace_bytes,
           void* stream = nullptr) {
    const std::vector<Tensor> tensors = signature_.arrange(bindings);
    check(ingot_program_run(program_.get(), signature_.batch(tensors), tensors.data(),
                            static_cast<int>(tensors.size()), workspace, workspace_bytes, stream));
  }
  // The same with a workspace of its own, which only host programs can allocate.
  void run(const Bindings& bindings, void* stream = nullptr) {
    const std::vector<Tensor> tensors = signature_.arrange(bindings);
    const bool on_host = tensors.empty() || tensors[0].device < 0;
    const size_t bytes = on_host ? prepare(bindings) : workspace_size(signature_.batch(tensors));
    for (const Tensor& tensor : tensors) {
      if (tensor.device >= 0 && bytes > 0) {
        throw Error(INGOT_INVALID_ARGUMENT, signature_.graph_name + " needs a workspace of " +
                                                std::to_string(bytes) +
                                                " bytes in the device's memory");
      }
    }
    // aligned_alloc wants a multiple of the alignment.
    const std::unique_ptr<void, detail::Free> workspace(
        std::aligned_alloc(256, (bytes / 256 + 1) * 256));
    if (!workspace) throw std::bad_alloc();
    run(bindings, workspace.get(), bytes, stream);
  }

  // Weights kept for inference, in device memory of the caller's: see ingot_program_freeze().
  size_t frozen_size() const {
    size_t bytes = 0;
    check(ingot_program_frozen_size(program_.get(), &bytes));
    return bytes;
  }
  void freeze(const Bindings& bindings, void* frozen, size_t frozen_bytes, void* stream = nullptr) {
    const std::vector<Tensor> tensors = signature_.arrange(bindings);
    check(ingot_program_freeze(program_.get(), signature_.batch(tensors), tensors.data(),
                               static_cast<int>(tensors.size()), frozen, frozen_bytes, stream));
  }
  void run_frozen(const Bindings& bindings, void* workspace, size_t workspace_bytes,
                  const void* frozen, size_t frozen_bytes, void* stream = nullptr) {
    const std::vector<Tensor> tensors = signature_.arrange(bindings);
    check(ingot_program_run_frozen(program_.get(), signature_.batch(tensors), tensors.data(),
                                   static_cast<int>(tensors.size()), workspace, workspace_bytes,
                                   frozen, frozen_bytes, stream));
  }

  // docs/signature-format.md
  std::string signature() const {
    char* text = nullptr;
    check(ingot_program_signature(program_.get(), &text));
    return detail::take(text);
  }

  // docs/explain-format.md
  std::string explain(int64_t batch) const {
    char* text = nullptr;
    check(ingot_program_explain(program_.get(), batch, &text));
    return detail::take(text);
  }

 private:
  struct Destroy {
    void operator()(ingot_program* program) const { ingot_program_destroy(program); }
  };
  detail::Signature signature_;
  std::unique_ptr<ingot_program, Destroy> program_;
};

inline Program compile(const Graph& graph, const Target& target = {}) {
  return Program(graph, target);
}

// Evaluates in double precision on the host, node by node: the truth that errors are measured
// against. Results must be f64; buffers of updates are written.
inline void evaluate_fp64(const Graph& graph, const Bindings& bindings) {
  const detail::Signature signature(graph);
  const std::vector<Tensor> tensors = signature.arrange(bindings);
  check(ingot_evaluate_fp64(graph.json().c_str(), signature.batch(tensors), tensors.data(),
                            static_cast<int>(tensors.size())));
}

// What this machine offers, as JSON.
inline std::string doctor() {
  char* text = nullptr;
  check(ingot_doctor(&text));
  return detail::take(text);
}

}  // namespace api
}  // namespace ingot

#endif
