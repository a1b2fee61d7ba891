// What the tests of the product on AMX tiles share.
#pragma once

#include <random>
#include <vector>

#include <nlohmann/json.hpp>

#include "cpu/product/amx/support.h"

namespace ingot::cpu::amx {

inline Isa machine() {
  return detect_isa(nlohmann::json::object());
}

// What runs here: the emulations, and the instructions where they execute.
inline std::vector<const Engine*> engines(Scheme scheme) {
  std::vector<const Engine*> found{emulated_engine()};
  if (&best_emulated_engine(machine()) != emulated_engine()) {
    found.push_back(&best_emulated_engine(machine()));
  }
  const Support usable = support(machine());
  if (scheme == Scheme::f3 ? usable.fp16 : usable.bf16) found.push_back(instruction_engine());
  return found;
}

inline const Engine& fastest(Scheme scheme) {
  return *engines(scheme).back();
}

class Random {
 public:
  explicit Random(unsigned seed) : generator_(seed) {}
  float normal() { return normal_(generator_); }
  float uniform() { return uniform_(generator_); }
  int integer(int from, int to) { return std::uniform_int_distribution<int>(from, to)(generator_); }

 private:
  std::mt19937 generator_;
  std::normal_distribution<float> normal_;
  std::uniform_real_distribution<float> uniform_;
};

}  // namespace ingot::cpu::amx
