// Rendezvous: where the ranks of a job find each other, derived from the launcher's environment alone.
//
// In:   the environment, what read_launch_environment() made of it. Out: the host of rank 0, the ports to try there, a name of the job.
// Next: cli/meeting.h connects the ranks.
//
// MASTER_ADDR and MASTER_PORT are obeyed where they are set. Otherwise the address is the loopback on one host and the first host
// of Slurm's list on several; ports are a sequence that follows from the launcher's job id, so that all ranks try the same ones
// and two jobs of a host try different ones. torchrun's agent keeps its own store at MASTER_PORT: then that port is not ours.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "mtraining/topology/topology.h"

namespace mtraining::topology {

struct Rendezvous {
  std::string address;
  std::vector<int> ports;      ///< rank 0 listens on the first that it can have
  bool port_is_given = false;  ///< by MASTER_PORT: there is no other
  bool address_is_given = false;
  bool one_host = false;
  std::string job;  ///< the same on all ranks, another one for every other job of the launcher
};

/// For a launch of several ranks. Errors: InvalidArgument, one sentence that says what to set: MASTER_PORT that is no port, no
/// address or no job id to be found, a list of hosts that cannot be read.
Rendezvous find_rendezvous(const LaunchEnvironment& launch, const VariableLookup& lookup);
Rendezvous find_rendezvous(const LaunchEnvironment& launch);

/// Slurm's "gpu[01-03,07],login1" or "r[0-1]n[1-2]-ib" -> all hosts in its order. Errors: InvalidArgument naming the text; more
/// than 100000 hosts.
std::vector<std::string> expand_host_list(std::string_view text);
/// Slurm's "2(x3),1" -> {2, 2, 2, 1}. Errors: InvalidArgument naming the text.
std::vector<int> expand_tasks_per_node(std::string_view text);

}  // namespace mtraining::topology
