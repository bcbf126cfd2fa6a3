// The ring of key blocks, played on the host with copies that land in any order and warpgroups that run at any speed.
#include "mtraining/kernels/pattern_cuda/key_walk.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/testing/random.h"

namespace mtraining::kernels::pattern_cuda {
namespace {

/// A barrier as the hardware keeps it: whoever waits for a parity passes unless the phase under way has it.
struct Barrier {
  int completed = 0, arrived = 0, needed = 1;
  void arrive() {
    if (++arrived < needed) return;
    arrived = 0;
    ++completed;
  }
  bool passes(int parity) const { return completed % 2 != parity; }
};

/// One thread block over `count` key blocks; what went wrong, or nothing. stages: 0 for KeyWalk's own.
std::string play(int tiles, int count, int stages, testing::Random& random) {
  struct Group {
    KeyWalk walk;
    int block;
    bool begun = false;  // its loads, where it is the first
  };
  std::vector<Group> groups;
  for (int g = 0; g < KeyWalk::kGroups; ++g) {
    KeyWalk walk(g, tiles);
    if (stages > 0) walk.stages = stages;
    groups.push_back({walk, walk.first});
  }
  const KeyWalk& walk = groups[0].walk;
  struct Slot {
    Barrier full, empty;
    int held = -1;
  };
  std::vector<Slot> slots(walk.stages);
  for (Slot& slot : slots) slot.empty.needed = tiles;
  std::vector<int> flying;
  int to_load = 0, load_end = std::min(count, walk.load_until(0));
  std::vector<int> visits(count, 0);
  for (;;) {
    // What can happen next: a copy lands, the next copy begins, a group goes on.
    std::vector<int> able;
    for (size_t f = 0; f < flying.size(); ++f) able.push_back(static_cast<int>(f));
    const bool loading = to_load < load_end;
    const int landings = static_cast<int>(able.size());
    const int round = loading ? to_load / walk.stages : 0;
    if (loading && (round == 0 || slots[to_load % walk.stages].empty.passes((round - 1) % 2)))
      able.push_back(landings);
    bool done = true;
    for (int g = 0; g < KeyWalk::kGroups; ++g) {
      const Group& group = groups[g];
      if (group.block >= count) continue;
      done = false;
      if (g == 0 && (loading || (group.block > 0 && !group.begun))) {
        if (!loading) able.push_back(landings + 1);
        continue;
      }
      if (slots[group.walk.slot].full.passes(group.walk.parity)) able.push_back(landings + 1 + g);
    }
    if (done) break;
    if (able.empty()) return "nobody can go on";
    const int chosen = able[random.below(static_cast<int64_t>(able.size()))];
    if (chosen < landings) {
      Slot& slot = slots[flying[chosen] % walk.stages];
      slot.held = flying[chosen];
      slot.full.arrive();
      flying.erase(flying.begin() + chosen);
    } else if (chosen == landings) {
      slots[to_load % walk.stages].held = -1;
      flying.push_back(to_load++);
    } else {
      Group& group = groups[chosen - landings - 1];
      if (&group == &groups[0] && group.block > 0 && !group.begun) {
        if (group.walk.load_from(group.block) != load_end && load_end < count)
          return concat("blocks from ", load_end, " are not loaded");
        load_end = std::min(count, group.walk.load_until(group.block));
        group.begun = true;
        continue;
      }
      Slot& slot = slots[group.walk.slot];
      if (slot.held != group.block)
        return concat("block ", group.block, " is read from a slot that holds ", slot.held);
      ++visits[group.block];
      slot.empty.arrive();
      group.block += group.walk.step;
      group.begun = false;
      group.walk.next();
    }
  }
  for (int i = 0; i < count; ++i)
    if (visits[i] != tiles) return concat("block ", i, " is visited ", visits[i], " times");
  return flying.empty() ? "" : "a copy lands after the end";
}

TEST(KeyWalk, EveryBlockIsReadFromItsSlotHoweverCopiesLand) {
  testing::Random random(5);
  for (const int tiles : {KeyWalk::kLeastTiles, 4, KeyWalk::kGroups})
    for (int count = 1; count <= 41; ++count)
      for (int repeat = 0; repeat < 40; ++repeat)
        ASSERT_EQ(play(tiles, count, 0, random), "") << tiles << " tiles, " << count << " blocks";
}

TEST(KeyWalk, NextGivesTheSlotAndTheParityOfEveryBlock) {
  for (const int tiles : {KeyWalk::kLeastTiles, 4, KeyWalk::kGroups}) {
    for (int group = 0; group < KeyWalk::kGroups; ++group) {
      KeyWalk walk(group, tiles);
      EXPECT_LE(tiles + walk.stages, KeyWalk::kTilesHeld);
      for (int block = walk.first; block < 100; block += walk.step, walk.next()) {
        ASSERT_EQ(walk.slot, block % walk.stages);
        ASSERT_EQ(walk.parity, block / walk.stages % 2);
      }
    }
  }
}

/// What the first test is for: in a ring of five, who visits every fourth block takes the phase before for the one it waits for.
TEST(KeyWalk, ARingThatIsNoMultipleOfTheStepIsFoundOut) {
  testing::Random random(6);
  for (const int tiles : {KeyWalk::kLeastTiles, 4}) {
    bool found = false;
    for (int repeat = 0; repeat < 1000 && !found; ++repeat)
      found = play(tiles, 30, 5, random).starts_with("block ");
    EXPECT_TRUE(found) << tiles << " tiles";
  }
}

}  // namespace
}  // namespace mtraining::kernels::pattern_cuda
