#include "mtraining/topology/topology.h"

#include <gtest/gtest.h>

#include <map>

#include "mtraining/base/check.h"
#include "mtraining/testing/error_of.h"

namespace mtraining::topology {
namespace {

using Environment = std::map<std::string, std::string>;

LaunchEnvironment read(const Environment& environment) {
  return read_launch_environment([&](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

std::string error_of(const Environment& environment) {
  return testing::error_of<InvalidArgument>([&] { read(environment); });
}

TEST(Topology, RankAndNodeWithLocalRankAreInverse) {
  for (int nodes : {1, 2, 3, 4, 16}) {
    for (int ranks : {1, 2, 3, 8}) {
      const Topology topology{nodes, ranks};
      EXPECT_EQ(topology.cp_size(), nodes * ranks);
      for (int rank = 0; rank < topology.cp_size(); ++rank) {
        EXPECT_LT(topology.node(rank), nodes);
        EXPECT_LT(topology.local_rank(rank), ranks);
        EXPECT_EQ(topology.cp_rank(topology.node(rank), topology.local_rank(rank)), rank);
      }
    }
  }
}

TEST(Topology, InnerSizeDividesTheGroup) {
  EXPECT_EQ(make_topology(32, 8), (Topology{4, 8}));
  EXPECT_EQ(make_topology(4, 1), (Topology{4, 1}));
  EXPECT_EQ(make_topology(4, 4), (Topology{1, 4}));
  EXPECT_THROW(make_topology(4, 3), InvalidArgument);
  EXPECT_THROW(make_topology(4, 0), InvalidArgument);
  EXPECT_THROW(make_topology(4, -2), InvalidArgument);
  EXPECT_THROW(make_topology(4, 8), InvalidArgument);
  EXPECT_THROW(make_topology(0, 1), InvalidArgument);
}

TEST(Topology, TextRoundTripsAndWrongTextIsRefused) {
  for (const char* text : {"1x1", "4x8", "16x8", "2x3"})
    EXPECT_EQ(to_string(parse_topology(text)), text);
  for (const char* text : {"", "x", "4", "4x", "x8", "0x8", "4x0", "-1x8", "4x8x2", "4 x 8", "4X8",
                           "a4x8", "99999999999x1", "65536x65536"}) {
    EXPECT_THROW(parse_topology(text), InvalidArgument) << text;
  }
}

TEST(LaunchEnvironment, TorchrunMpirunSrunAndNone) {
  auto e =
      read({{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}});
  EXPECT_EQ(e.launcher, "torchrun");
  EXPECT_EQ(e.rank, 5);
  EXPECT_EQ(e.world_size, 8);
  EXPECT_EQ(e.local_rank, 1);
  EXPECT_EQ(e.local_world_size, 4);

  e = read({{"OMPI_COMM_WORLD_RANK", "3"},
            {"OMPI_COMM_WORLD_SIZE", "4"},
            {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}});
  EXPECT_EQ(e.launcher, "mpirun");
  EXPECT_EQ(e.rank, 3);
  EXPECT_EQ(e.local_world_size, 4);

  e = read({{"SLURM_PROCID", "9"},
            {"SLURM_NTASKS", "16"},
            {"SLURM_LOCALID", "1"},
            {"SLURM_TASKS_PER_NODE", "8(x2)"}});
  EXPECT_EQ(e.launcher, "srun");
  EXPECT_EQ(e.rank, 9);
  EXPECT_EQ(e.local_rank, 1);
  EXPECT_EQ(e.local_world_size, 8);
  e = read({{"SLURM_PROCID", "0"},
            {"SLURM_NTASKS", "12"},
            {"SLURM_LOCALID", "0"},
            {"SLURM_TASKS_PER_NODE", "8,4"}});
  EXPECT_FALSE(e.local_world_size.has_value());

  e = read({});
  EXPECT_EQ(e.launcher, "none");
  EXPECT_EQ(e.rank, 0);
  EXPECT_EQ(e.world_size, 1);
  EXPECT_FALSE(e.local_world_size.has_value())
      << "an unknown node size must not pass for one rank a node";
}

TEST(LaunchEnvironment, TorchrunWinsOverTheSchedulerAroundIt) {
  const auto e =
      read({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}});
  EXPECT_EQ(e.launcher, "torchrun");
  EXPECT_EQ(e.rank, 1);
  EXPECT_FALSE(e.local_world_size.has_value());
}

TEST(LaunchEnvironment, WrongVariablesAreNamed) {
  EXPECT_NE(error_of({{"RANK", "one"}, {"WORLD_SIZE", "2"}}).find("RANK"), std::string::npos);
  EXPECT_NE(error_of({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}).find("RANK"), std::string::npos);
  EXPECT_NE(error_of({{"RANK", "1"}}).find("WORLD_SIZE"), std::string::npos);
  EXPECT_NE(error_of({{"WORLD_SIZE", "2"}}).find("RANK"), std::string::npos);
  EXPECT_NE(error_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}).find("RANK"), std::string::npos);
  EXPECT_NE(error_of({{"RANK", "0"}, {"WORLD_SIZE", "0"}}).find("WORLD_SIZE"), std::string::npos);
  EXPECT_NE(error_of({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1x"}}).find("LOCAL_RANK"),
            std::string::npos);
  EXPECT_FALSE(
      error_of({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "3"}, {"LOCAL_WORLD_SIZE", "2"}})
          .empty());
  EXPECT_NE(error_of({{"OMPI_COMM_WORLD_RANK", "7"}, {"OMPI_COMM_WORLD_SIZE", "4"}})
                .find("OMPI_COMM_WORLD_RANK"),
            std::string::npos);
  EXPECT_NE(error_of({{"SLURM_PROCID", "x"}, {"SLURM_NTASKS", "4"}}).find("SLURM_PROCID"),
            std::string::npos);
}

}  // namespace
}  // namespace mtraining::topology
