// Finds and opens the CUDA libraries at run time: nothing of CUDA is needed to build Ingot.
#pragma once

#include <string>
#include <vector>

namespace ingot::cuda {

// An open library. Never closed: its code may be in use until the process ends.
class SharedLibrary {
 public:
  SharedLibrary() = default;

  // Tries, in this order: the path or folder in the environment variable; the names as the loader
  // finds them (a library that the process has loaded already is found so); the folders of CUDA
  // libraries already in the process (PyTorch's wheels keep theirs side by side); /usr/local/cuda.
  static SharedLibrary open(const std::vector<std::string>& names, const char* environment);

  bool is_open() const { return handle_ != nullptr; }
  const std::string& path() const { return path_; }
  const std::string& error() const { return error_; }  // why it is not open

  // nullptr where the library has no such symbol.
  void* find(const char* symbol) const;
  // Sets `function`; false where the symbol is missing.
  template <class Function>
  bool load(Function& function, const char* symbol) const {
    function = reinterpret_cast<Function>(find(symbol));
    return function != nullptr;
  }

 private:
  void* handle_ = nullptr;
  std::string path_, error_;
};

}  // namespace ingot::cuda
