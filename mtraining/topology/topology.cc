#include "mtraining/topology/topology.h"

#include <charconv>
#include <cstdlib>
#include <limits>

#include "mtraining/base/check.h"

namespace mtraining::topology {
namespace {

/// The whole of `text` as a non-negative int, or nothing.
std::optional<int> parse_int(std::string_view text) {
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (text.empty() || error != std::errc() || stop != end || value < 0) return std::nullopt;
  return value;
}

class Variables {
 public:
  explicit Variables(const VariableLookup& lookup) : lookup_(lookup) {}

  std::optional<std::string> text(const char* name) const {
    const char* value = lookup_(name);
    if (value == nullptr || *value == '\0') return std::nullopt;
    return std::string(value);
  }
  bool has(const char* name) const { return text(name).has_value(); }

  std::optional<int> number(const char* name) const {
    const auto value = text(name);
    if (!value) return std::nullopt;
    const auto parsed = parse_int(*value);
    MT_CHECK_ARG(parsed.has_value(), "environment variable ", name,
                 ": expected a non-negative number, got '", *value, "'");
    return parsed;
  }
  int required(const char* name, const char* because) const {
    const auto value = number(name);
    MT_CHECK_ARG(value.has_value(), "environment variable ", name, ": expected it beside ", because,
                 ", got nothing");
    return *value;
  }

 private:
  const VariableLookup& lookup_;
};

/// SLURM_TASKS_PER_NODE: "8" or "8(x4)"; nothing where nodes differ ("8,4") .
std::optional<int> uniform_tasks_per_node(const std::string& text) {
  const std::string_view view(text);
  const size_t paren = view.find("(x");
  if (paren == std::string_view::npos) return parse_int(view);
  if (view.back() != ')' || !parse_int(view.substr(paren + 2, view.size() - paren - 3))) {
    return std::nullopt;
  }
  return parse_int(view.substr(0, paren));
}

void check_rank(const LaunchEnvironment& environment, const char* rank_name,
                const char* size_name) {
  MT_CHECK_ARG(environment.world_size >= 1, "environment variable ", size_name,
               ": expected >= 1, got ", environment.world_size);
  MT_CHECK_ARG(environment.rank < environment.world_size, "environment variable ", rank_name,
               ": expected less than ", size_name, " = ", environment.world_size, ", got ",
               environment.rank);
  if (environment.local_world_size) {
    MT_CHECK_ARG(*environment.local_world_size >= 1 &&
                     environment.local_rank < *environment.local_world_size,
                 "environment of ", environment.launcher, ": expected local rank below the ",
                 *environment.local_world_size, " ranks of a node, got ", environment.local_rank);
  }
}

}  // namespace

Topology make_topology(int cp_size, int cp_inner_size) {
  MT_CHECK_ARG(cp_size >= 1, "parallel.cp_size: expected >= 1, got ", cp_size);
  MT_CHECK_ARG(cp_inner_size >= 1 && cp_size % cp_inner_size == 0,
               "parallel.cp_inner_size: expected a divisor of parallel.cp_size = ", cp_size,
               ", got ", cp_inner_size);
  return {.nodes = cp_size / cp_inner_size, .ranks_per_node = cp_inner_size};
}

Topology parse_topology(std::string_view text) {
  const size_t cross = text.find('x');
  std::optional<int> nodes, ranks;
  if (cross != std::string_view::npos) {
    nodes = parse_int(text.substr(0, cross));
    ranks = parse_int(text.substr(cross + 1));
  }
  MT_CHECK_ARG(nodes && ranks && *nodes >= 1 && *ranks >= 1,
               "topology: expected NODESxRANKS such as 4x8, got '", text, "'");
  MT_CHECK_ARG(*nodes <= std::numeric_limits<int>::max() / *ranks,
               "topology: expected a number of ranks that fits an int, got '", text, "'");
  return {.nodes = *nodes, .ranks_per_node = *ranks};
}

std::string to_string(const Topology& topology) {
  return concat(topology.nodes, "x", topology.ranks_per_node);
}

LaunchEnvironment read_launch_environment(const VariableLookup& lookup) {
  const Variables variables(lookup);
  LaunchEnvironment result;
  if (variables.has("RANK") || variables.has("WORLD_SIZE")) {
    result.launcher = "torchrun";
    result.rank = variables.required("RANK", "WORLD_SIZE");
    result.world_size = variables.required("WORLD_SIZE", "RANK");
    result.local_world_size = variables.number("LOCAL_WORLD_SIZE");
    result.local_rank = variables.number("LOCAL_RANK").value_or(result.rank);
    check_rank(result, "RANK", "WORLD_SIZE");
  } else if (variables.has("OMPI_COMM_WORLD_RANK") || variables.has("OMPI_COMM_WORLD_SIZE")) {
    result.launcher = "mpirun";
    result.rank = variables.required("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
    result.world_size = variables.required("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK");
    result.local_world_size = variables.number("OMPI_COMM_WORLD_LOCAL_SIZE");
    result.local_rank = variables.number("OMPI_COMM_WORLD_LOCAL_RANK").value_or(result.rank);
    check_rank(result, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  } else if (variables.has("SLURM_PROCID") && variables.has("SLURM_NTASKS")) {
    // Both, because a batch script that has started no step yet may carry one of them alone.
    result.launcher = "srun";
    result.rank = variables.required("SLURM_PROCID", "SLURM_NTASKS");
    result.world_size = variables.required("SLURM_NTASKS", "SLURM_PROCID");
    result.local_rank = variables.number("SLURM_LOCALID").value_or(result.rank);
    result.local_world_size = variables.number("SLURM_NTASKS_PER_NODE");
    for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
      if (result.local_world_size) break;
      if (const auto text = variables.text(name)) {
        result.local_world_size = uniform_tasks_per_node(*text);
      }
    }
    check_rank(result, "SLURM_PROCID", "SLURM_NTASKS");
  } else {
    result.launcher = "none";
  }
  return result;
}

LaunchEnvironment read_launch_environment() {
  return read_launch_environment([](const char* name) -> const char* { return std::getenv(name); });
}

}  // namespace mtraining::topology
