// Graphs as JSON (docs/graph-format.md).
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "graph/graph.h"

namespace ingot {

// Reads a graph, expanding high-level operators. Throws Error (INGOT_INVALID_ARGUMENT, or
// INGOT_UNSUPPORTED for an operator that does not exist) naming the value, its origin and source.
Graph import_graph(std::string_view text);
// The same, where the text was parsed already.
Graph graph_from(const nlohmann::json& json);
// The graph in the same format, by primitive operators alone: import_graph() gives it back.
nlohmann::json export_graph(const Graph& graph);

}  // namespace ingot
