// Topology: how the ranks of a context-parallel group sit on nodes.
//
// In:   cp_size and cp_inner_size (ranks of a node that form the inner ring), or the launcher's
//       environment.
// Out:  node and local_rank of each cp_rank; neighbours in the inner and the outer ring.
// Next: layout/ numbers residues by it, ring/ builds schedules over it, comm/ opens communicators
//       along it.
//
// cp_rank = node * ranks_per_node + local_rank. Thread-safe, copyable.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace mtraining::topology {

struct Topology {
  int nodes = 1;
  int ranks_per_node = 1;  ///< cp_inner_size, L

  int cp_size() const { return nodes * ranks_per_node; }
  int node(int cp_rank) const { return cp_rank / ranks_per_node; }
  int local_rank(int cp_rank) const { return cp_rank % ranks_per_node; }
  int cp_rank(int node, int local_rank) const { return node * ranks_per_node + local_rank; }
  bool operator==(const Topology&) const = default;
};

/// From cp_size and cp_inner_size. 1 and cp_size are legal inner sizes and equal a flat ring.
/// Errors: InvalidArgument where cp_inner_size < 1 or does not divide cp_size (names
/// parallel.cp_inner_size).
Topology make_topology(int cp_size, int cp_inner_size);

/// "4x8" -> 4 nodes of 8 ranks. Errors: InvalidArgument naming the text and the expected form
/// NODESxRANKS.
Topology parse_topology(std::string_view text);
std::string to_string(const Topology& topology);

/// What a launcher tells a process. Read from
/// RANK/WORLD_SIZE/LOCAL_RANK/LOCAL_WORLD_SIZE/MASTER_ADDR/MASTER_PORT (torchrun, --nproc),
/// OMPI_COMM_WORLD_* (mpirun) or SLURM_PROCID/SLURM_NTASKS/SLURM_LOCALID/.. (srun).
struct LaunchEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  /// Absent where the launcher does not say: then a hierarchical ring needs cp_inner_size.
  std::optional<int> local_world_size;
  std::string launcher;  ///< "torchrun" | "mpirun" | "srun" | "none"
  /// False where the variables may be left from something around this process (the shell of a Slurm batch script).
  bool certain = true;
};

/// Errors: InvalidArgument where a variable is set but not a number, one of a pair is missing, rank >= world_size, tasks of
/// the nodes do not make world_size, or two launchers disagree; names the variables.
LaunchEnvironment read_launch_environment();
/// The same from any source of variables: null or "" where one is not set.
using VariableLookup = std::function<const char*(const char* name)>;
LaunchEnvironment read_launch_environment(const VariableLookup& lookup);

}  // namespace mtraining::topology
