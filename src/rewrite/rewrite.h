// Algebra on graphs. Each rule is one small file in this folder, with the identity it rests on.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "rewrite/edit.h"

namespace ingot {

// ieee: equal for every finite input up to rounding, NaN and Inf go where the original sends them.
// real: equal in real arithmetic only.
enum class RewriteLevel : uint8_t { ieee, real };

struct AppliedRewrite {
  std::string rule;      // "fold-scale-into-affine"
  std::string identity;  // "(x − μ)·r·γ·s + β·s = (x − μ)·(r·γ·s) + β·s"
  std::string where;     // names and source lines of the nodes it touched
};

struct Rule {
  std::string_view name, identity;
  RewriteLevel level;
  NodeRewrite (*begin)();  // for one pass over a graph: what it remembers lasts as long
};

template <ValueId (*kRewrite)(NodeEdit&)>
NodeRewrite stateless() {
  return kRewrite;
}

// All rules, in the order in which they are tried.
const std::vector<Rule>& rules();

// Applies rules until none matches (bounded), then removes what is dead.
Graph rewrite(Graph graph, RewriteLevel level, std::vector<AppliedRewrite>* applied);

}  // namespace ingot
