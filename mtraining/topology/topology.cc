#include "mtraining/topology/topology.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/topology/rendezvous.h"

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

/// Slurm's word on how tasks lie on nodes: their number where all nodes have equally many, else nothing.
std::optional<int> uniform_tasks_per_node(const Variables& variables, int world_size) {
  // SLURM_NTASKS_PER_NODE is what was asked for; the last node may have fewer.
  if (const auto text = variables.text("SLURM_STEP_TASKS_PER_NODE")) {
    const std::vector<int> tasks = expand_tasks_per_node(*text);
    const int64_t sum = std::accumulate(tasks.begin(), tasks.end(), int64_t{0});
    MT_CHECK_ARG(sum == world_size, "environment variable SLURM_STEP_TASKS_PER_NODE: expected ",
                 world_size, " tasks as SLURM_NTASKS says, got ", sum, " in '", *text, "'");
    const bool equal = std::equal(tasks.begin() + 1, tasks.end(), tasks.begin());
    return equal ? std::optional<int>(tasks.front()) : std::nullopt;
  }
  if (const auto number = variables.number("SLURM_NTASKS_PER_NODE")) return number;
  if (const auto text = variables.text("SLURM_TASKS_PER_NODE")) {
    const std::vector<int> tasks = expand_tasks_per_node(*text);
    if (std::equal(tasks.begin() + 1, tasks.end(), tasks.begin())) return tasks.front();
  }
  return std::nullopt;
}

/// Variables of two launchers around one process, of which neither started the other: whichever is believed, ranks are wrong.
void check_single_launcher(const Variables& variables, const LaunchEnvironment& believed,
                           const char* rank_name, const char* size_name) {
  if (variables.has("TORCHELASTIC_RUN_ID")) return;  // torchrun is what the other one started
  const auto rank = variables.number(rank_name), size = variables.number(size_name);
  if (!rank || !size || *size <= 1) return;
  MT_CHECK_ARG(*rank == believed.rank && *size == believed.world_size,
               "environment: expected one launcher, got two that disagree: RANK = ", believed.rank,
               " of WORLD_SIZE = ", believed.world_size, " and ", rank_name, " = ", *rank, " of ",
               size_name, " = ", *size, "; unset the one that did not start these ranks");
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
    check_single_launcher(variables, result, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
    // mpirun's daemons are tasks of a step of their own.
    if (!variables.has("OMPI_COMM_WORLD_RANK"))
      check_single_launcher(variables, result, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS");
  } else if (variables.has("OMPI_COMM_WORLD_RANK") || variables.has("OMPI_COMM_WORLD_SIZE")) {
    result.launcher = "mpirun";
    result.rank = variables.required("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
    result.world_size = variables.required("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK");
    result.local_world_size = variables.number("OMPI_COMM_WORLD_LOCAL_SIZE");
    result.local_rank = variables.number("OMPI_COMM_WORLD_LOCAL_RANK").value_or(result.rank);
    check_rank(result, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  } else if (variables.has("SLURM_PROCID") &&
             (variables.has("SLURM_NTASKS") || variables.has("SLURM_STEP_NUM_TASKS"))) {
    // Both, because a batch script that has started no step yet may carry one of them alone.
    result.launcher = "srun";
    result.rank = variables.required("SLURM_PROCID", "SLURM_NTASKS");
    const auto of_step = variables.number("SLURM_STEP_NUM_TASKS");
    result.world_size = of_step ? *of_step : variables.required("SLURM_NTASKS", "SLURM_PROCID");
    result.local_rank = variables.number("SLURM_LOCALID").value_or(result.rank);
    result.local_world_size = uniform_tasks_per_node(variables, result.world_size);
    // A batch script's first shell carries the job's SLURM_PROCID and SLURM_NTASKS without being a task of a step.
    result.certain = of_step.has_value() || variables.has("SLURM_STEP_ID") ||
                     variables.has("SLURM_STEP_TASKS_PER_NODE");
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
