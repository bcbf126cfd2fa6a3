#include "mtraining/topology/rendezvous.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "mtraining/base/check.h"
#include "mtraining/testing/error_of.h"

namespace mtraining::topology {
namespace {

using Environment = std::map<std::string, std::string>;

Rendezvous find(const Environment& environment) {
  const VariableLookup lookup = [&](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  };
  return find_rendezvous(read_launch_environment(lookup), lookup);
}

std::string error_of(const Environment& environment) {
  return testing::error_of<InvalidArgument>([&] { find(environment); });
}

Environment srun(int rank, const std::string& tasks, const std::string& hosts) {
  return {{"SLURM_PROCID", std::to_string(rank)},
          {"SLURM_NTASKS", "7"},
          {"SLURM_STEP_NUM_TASKS", "7"},
          {"SLURM_LOCALID", "0"},
          {"SLURM_STEP_TASKS_PER_NODE", tasks},
          {"SLURM_STEP_NODELIST", hosts},
          {"SLURM_JOB_ID", "4711"},
          {"SLURM_STEP_ID", "0"}};
}

Environment mpirun(int rank, int size, int local_size) {
  return {{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
          {"OMPI_COMM_WORLD_SIZE", std::to_string(size)},
          {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", std::to_string(local_size)},
          {"PMIX_NAMESPACE", "1081344001"}};
}

TEST(HostList, BracketsRangesPaddingAndProducts) {
  using Hosts = std::vector<std::string>;
  EXPECT_EQ(expand_host_list("gpu7"), (Hosts{"gpu7"}));
  EXPECT_EQ(expand_host_list("a,b-2.site"), (Hosts{"a", "b-2.site"}));
  EXPECT_EQ(expand_host_list("gpu[08-11],login1"),
            (Hosts{"gpu08", "gpu09", "gpu10", "gpu11", "login1"}));
  EXPECT_EQ(expand_host_list("n[1,3-4,099]"), (Hosts{"n1", "n3", "n4", "n099"}));
  EXPECT_EQ(expand_host_list("r[0-1]n[1-2]-ib"),
            (Hosts{"r0n1-ib", "r0n2-ib", "r1n1-ib", "r1n2-ib"}));
  EXPECT_EQ(expand_host_list("n[1-70000]").size(), 70000u);
}

TEST(HostList, OtherTextsAreRefused) {
  for (const char* text :
       {"", ",a", "a,", "n[1-", "n1-2]", "n[]", "n[a-b]", "n[2-1]", "n[1-2", "n[[1]]", "n[1-]",
        "n[1-99999999]", "r[1-1000]n[1-1000]", "n[1-60000],m[1-60000]"}) {
    EXPECT_THROW(expand_host_list(text), InvalidArgument) << text;
  }
}

TEST(TasksPerNode, RepeatsAndRefusals) {
  EXPECT_EQ(expand_tasks_per_node("8"), (std::vector<int>{8}));
  EXPECT_EQ(expand_tasks_per_node("2(x3),1"), (std::vector<int>{2, 2, 2, 1}));
  EXPECT_EQ(expand_tasks_per_node("1,2(x2)"), (std::vector<int>{1, 2, 2}));
  for (const char* text : {"", "x", "2(x)", "2(x0)", "2(x3", "2x3", "2,", "2(x1000000000)", "-1"})
    EXPECT_THROW(expand_tasks_per_node(text), InvalidArgument) << text;
}

TEST(Rendezvous, SlurmsFirstHostAndAPortOfTheStep) {
  const Rendezvous first = find(srun(0, "2(x3),1", "gpu[03-06]"));
  EXPECT_EQ(first.address, "gpu03");
  EXPECT_FALSE(first.one_host);
  EXPECT_FALSE(first.port_is_given);
  for (int rank = 1; rank < 7; ++rank) {
    const Rendezvous other = find(srun(rank, "2(x3),1", "gpu[03-06]"));
    EXPECT_EQ(other.ports, first.ports);
    EXPECT_EQ(other.job, first.job);
  }
  Environment next = srun(0, "2(x3),1", "gpu[03-06]");
  next["SLURM_STEP_ID"] = "1";
  EXPECT_NE(find(next).job, first.job);
  EXPECT_NE(find(next).ports, first.ports);
  next = srun(0, "2(x3),1", "gpu[03-06]");
  next["SLURM_RESTART_COUNT"] = "1";
  EXPECT_NE(find(next).job, first.job);
  next.erase("SLURM_STEP_NODELIST");
  next["SLURM_LAUNCH_NODE_IPADDR"] = "10.1.2.3";
  EXPECT_EQ(find(next).address, "10.1.2.3");
}

TEST(Rendezvous, OneHostMeetsOnTheLoopback) {
  EXPECT_EQ(find(srun(0, "7", "gpu03")).address, "127.0.0.1");
  EXPECT_TRUE(find(srun(0, "7", "gpu03")).one_host);
  EXPECT_EQ(find(mpirun(1, 4, 4)).address, "127.0.0.1");
  EXPECT_EQ(find(mpirun(1, 4, 4)).ports, find(mpirun(3, 4, 4)).ports);
}

TEST(Rendezvous, PortsAreManyDistinctAndBelowTheEphemeralOnes) {
  std::set<int> firsts;
  for (int job = 0; job < 200; ++job) {
    Environment environment = mpirun(0, 4, 4);
    environment["PMIX_NAMESPACE"] = std::to_string(1081344001 + 65536 * job);
    const std::vector<int> ports = find(environment).ports;
    EXPECT_EQ(std::set<int>(ports.begin(), ports.end()).size(), 16u);
    for (const int port : ports) {
      EXPECT_GE(port, 10000);
      EXPECT_LT(port, 32768);
    }
    firsts.insert(ports.front());
  }
  EXPECT_GT(firsts.size(), 190u);
}

TEST(Rendezvous, WhatIsGivenIsObeyed) {
  Environment environment = srun(2, "2(x3),1", "gpu[03-06]");
  environment["MASTER_ADDR"] = "head";
  EXPECT_EQ(find(environment).address, "head");
  EXPECT_FALSE(find(environment).port_is_given);
  environment["MASTER_PORT"] = "23456";
  EXPECT_EQ(find(environment).ports, std::vector<int>{23456});
  EXPECT_TRUE(find(environment).port_is_given);

  const Environment plain = {{"RANK", "1"},        {"WORLD_SIZE", "2"},
                             {"LOCAL_RANK", "1"},  {"LOCAL_WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "h"}, {"MASTER_PORT", "1234"}};
  EXPECT_EQ(find(plain).ports, std::vector<int>{1234});
  // torchrun's agent listens there itself.
  Environment torchrun = plain;
  torchrun["TORCHELASTIC_RUN_ID"] = "none";
  torchrun["TORCHELASTIC_RESTART_COUNT"] = "0";
  torchrun["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_FALSE(find(torchrun).port_is_given);
  Environment restarted = torchrun;
  restarted["TORCHELASTIC_RESTART_COUNT"] = "1";
  EXPECT_NE(find(restarted).job, find(torchrun).job);
  torchrun["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  EXPECT_EQ(find(torchrun).ports, std::vector<int>{1234});
}

TEST(Rendezvous, WhatIsMissingIsNamedWithWhatToSet) {
  EXPECT_NE(error_of(mpirun(0, 8, 4)).find("mpirun -x MASTER_ADDR=HOST"), std::string::npos);
  Environment environment = mpirun(0, 8, 4);
  environment["SLURM_JOB_NODELIST"] = "gpu[3-4]";
  EXPECT_EQ(find(environment).address, "gpu3");
  environment = mpirun(0, 4, 4);
  environment.erase("PMIX_NAMESPACE");
  EXPECT_NE(error_of(environment).find("MASTER_PORT"), std::string::npos);
  environment = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "2"}};
  EXPECT_NE(error_of(environment).find("MASTER_ADDR"), std::string::npos);
  environment["MASTER_ADDR"] = "127.0.0.1";
  EXPECT_NE(error_of(environment).find("MASTER_PORT"), std::string::npos);
  for (const char* port : {"0", "65536", "x", "-1", "29500x"}) {
    environment["MASTER_PORT"] = port;
    EXPECT_NE(error_of(environment).find("MASTER_PORT: expected 1 to 65535"), std::string::npos);
  }
}

TEST(LaunchEnvironment, TasksOfTheStepCountAndMustFit) {
  Environment environment = srun(0, "2(x3),1", "gpu[03-06]");
  const VariableLookup lookup = [&](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  };
  EXPECT_FALSE(read_launch_environment(lookup).local_world_size.has_value());
  EXPECT_TRUE(read_launch_environment(lookup).certain);
  environment["SLURM_STEP_TASKS_PER_NODE"] = "7(x1)";
  environment["SLURM_NTASKS_PER_NODE"] = "8";  // what was asked for, not what there is
  EXPECT_EQ(read_launch_environment(lookup).local_world_size, 7);
  environment["SLURM_STEP_TASKS_PER_NODE"] = "2(x3),2";
  EXPECT_THROW(read_launch_environment(lookup), InvalidArgument);
  environment.erase("SLURM_STEP_TASKS_PER_NODE");
  environment.erase("SLURM_STEP_NUM_TASKS");
  environment.erase("SLURM_STEP_ID");
  EXPECT_FALSE(read_launch_environment(lookup).certain);
}

TEST(LaunchEnvironment, TwoLaunchersThatDisagreeAreRefused) {
  Environment environment = mpirun(2, 4, 4);
  environment["RANK"] = "0";
  environment["WORLD_SIZE"] = "1";
  environment["MASTER_ADDR"] = "127.0.0.1";
  environment["MASTER_PORT"] = "29500";
  EXPECT_NE(error_of(environment).find("OMPI_COMM_WORLD_RANK = 2 of OMPI_COMM_WORLD_SIZE = 4"),
            std::string::npos);
  environment["TORCHELASTIC_RUN_ID"] = "none";  // one torchrun a process of mpirun
  EXPECT_EQ(error_of(environment), "");
  environment.erase("TORCHELASTIC_RUN_ID");
  environment["RANK"] = "2";
  environment["WORLD_SIZE"] = "4";  // a script's translation: they agree
  EXPECT_EQ(error_of(environment), "");
  Environment slurm = srun(3, "7", "gpu03");
  slurm["RANK"] = "0";
  slurm["WORLD_SIZE"] = "2";
  EXPECT_NE(error_of(slurm).find("SLURM_PROCID = 3"), std::string::npos);
}

}  // namespace
}  // namespace mtraining::topology
