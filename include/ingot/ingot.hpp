// The C++ API of Ingot: header-only over the C ABI of ingot.h, C++20, nothing else needed.
//
//   ingot::Graph graph("linear_relu");
//   auto x = graph.input("x", ingot::Shape::batch(1024));
//   auto w = graph.parameter("weight", ingot::Shape::matrix(512, 1024));
//   graph.result(relu(matmul_transposed(x, w)), "y");
//   ingot::Program program = ingot::compile(graph, {.device = "cpu"});
//   program.run({{"x", ingot::host(x_data, ingot::Shape::batch(1024), 64)}, ...});
//
// Everything that fails throws ingot::Error, whose message says what was wrong, where, and what to
// do.
#ifndef INGOT_INGOT_HPP_
#define INGOT_INGOT_HPP_

#include "ingot/graph.hpp"
#include "ingot/program.hpp"

#endif
