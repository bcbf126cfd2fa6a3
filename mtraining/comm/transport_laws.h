// Transport laws: what every Transport must do, as one test body that loopback threads and Gloo processes both run.
//
// In:   a Transport on each rank. Out: gtest expectations. Next: loopback_test.cc, c10d_test.cc.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/comm/transport.h"

namespace mtraining::comm::laws {

template <typename T>
ConstBuffer bytes_of(const std::vector<T>& values) {
  return {values.data(), static_cast<int64_t>(values.size() * sizeof(T))};
}
template <typename T>
Buffer bytes_of(std::vector<T>& values) {
  return {values.data(), static_cast<int64_t>(values.size() * sizeof(T))};
}

inline std::vector<int> all_ranks(const Transport& transport) {
  std::vector<int> members(static_cast<size_t>(transport.size()));
  std::iota(members.begin(), members.end(), 0);
  return members;
}

/// The same values on every rank that asks for (rank, seed).
inline std::vector<float> values_of(int rank, int64_t count, uint32_t seed) {
  std::mt19937 random(seed * 1000003u + static_cast<uint32_t>(rank));
  std::vector<float> values(static_cast<size_t>(count));
  for (float& v : values)
    v = std::ldexp(static_cast<float>(static_cast<int32_t>(random())),
                   -20 + static_cast<int>(random() % 12));
  return values;
}

inline uint16_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

/// Rank-order float32 sum: the truth that a sum must equal bit for bit.
inline std::vector<float> sum_of(int ranks, int64_t count, uint32_t seed) {
  std::vector<float> sum = values_of(0, count, seed);
  for (int r = 1; r < ranks; ++r) {
    const std::vector<float> other = values_of(r, count, seed);
    for (int64_t i = 0; i < count; ++i) sum[i] += other[i];
  }
  return sum;
}

inline void exchanges_arrive_in_order(Transport& transport) {
  CommunicatorPtr group = transport.open("exchanges", all_ranks(transport));
  const int rank = group->rank(), size = group->size();
  for (int hop = 0; hop <= size; ++hop) {
    const int to = (rank + hop) % size, from = (rank - hop % size + size) % size;
    const int64_t count = 1000 * hop + 1;
    std::vector<std::vector<float>> k, v, k_got, v_got;
    std::vector<WorkPtr> works;
    constexpr int kAtOnce = 3;
    for (int i = 0; i < kAtOnce; ++i) {
      k.push_back(values_of(rank, count, static_cast<uint32_t>(10 * hop + i)));
      v.push_back(values_of(rank, count / 2, static_cast<uint32_t>(10 * hop + i + 500)));
      k_got.emplace_back(static_cast<size_t>(count), -1.f);
      v_got.emplace_back(static_cast<size_t>(count / 2), -1.f);
    }
    for (int i = 0; i < kAtOnce; ++i) {
      works.push_back(
          group->exchange(to, {bytes_of(std::as_const(k[i])), bytes_of(std::as_const(v[i]))}, from,
                          {bytes_of(k_got[i]), bytes_of(v_got[i])}));
    }
    for (int i = kAtOnce - 1; i >= 0; --i) works[i]->wait();  // any order of waiting will do
    for (int i = 0; i < kAtOnce; ++i) {
      EXPECT_EQ(k_got[i], values_of(from, count, static_cast<uint32_t>(10 * hop + i)));
      EXPECT_EQ(v_got[i], values_of(from, count / 2, static_cast<uint32_t>(10 * hop + i + 500)));
    }
  }
}

inline void collectives_equal_their_definition(Transport& transport) {
  CommunicatorPtr group = transport.open("collectives", all_ranks(transport));
  const int rank = group->rank(), size = group->size();
  for (int64_t count : {int64_t{1}, int64_t{0}, int64_t{7}, int64_t{1025}, int64_t{70001}}) {
    const auto seed = static_cast<uint32_t>(count + 3);
    {
      const std::vector<float> mine = values_of(rank, count, seed);
      std::vector<std::vector<float>> got(static_cast<size_t>(size),
                                          std::vector<float>(static_cast<size_t>(count)));
      std::vector<Buffer> parts;
      for (auto& part : got) parts.push_back(bytes_of(part));
      group->all_gather(bytes_of(mine), parts)->wait();
      for (int r = 0; r < size; ++r) EXPECT_EQ(got[r], values_of(r, count, seed));
    }
    {
      const std::vector<float> all = values_of(rank, count * size, seed);
      std::vector<ConstBuffer> parts;
      for (int r = 0; r < size; ++r) parts.push_back({all.data() + r * count, count * 4});
      std::vector<float> got(static_cast<size_t>(count));
      group->reduce_scatter(parts, bytes_of(got), ElementType::kFloat32)->wait();
      const std::vector<float> sum = sum_of(size, count * size, seed);
      EXPECT_EQ(got,
                std::vector<float>(sum.begin() + rank * count, sum.begin() + (rank + 1) * count));
    }
    {
      std::vector<float> sum = values_of(rank, count, seed), max = sum;
      std::vector<double> sum64(sum.begin(), sum.end());
      std::vector<int64_t> integers(static_cast<size_t>(count));
      std::vector<uint16_t> bf16(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) {
        integers[i] = (int64_t{1} << 60) / (rank + 1) + i;
        bf16[i] = to_bf16(sum[i]);
      }
      std::vector<int32_t> integer_max(static_cast<size_t>(count), -rank);
      WorkPtr works[] = {
          group->all_reduce(bytes_of(sum), ElementType::kFloat32, ReduceOp::kSum),
          group->all_reduce(bytes_of(max), ElementType::kFloat32, ReduceOp::kMax),
          group->all_reduce(bytes_of(sum64), ElementType::kFloat64, ReduceOp::kSum),
          group->all_reduce(bytes_of(integers), ElementType::kInt64, ReduceOp::kSum),
          group->all_reduce(bytes_of(integer_max), ElementType::kInt32, ReduceOp::kMax),
          group->all_reduce(bytes_of(bf16), ElementType::kBFloat16, ReduceOp::kSum)};
      for (WorkPtr& work : works) work->wait();
      EXPECT_EQ(sum, sum_of(size, count, seed));
      EXPECT_EQ(integer_max, std::vector<int32_t>(static_cast<size_t>(count), 0));
      for (int64_t i = 0; i < count; ++i) {
        float want_max = -std::numeric_limits<float>::infinity(), want_bf16 = 0;
        double want64 = 0;
        int64_t want_integer = 0;
        for (int r = 0; r < size && i < 50; ++r) {
          const float value = values_of(r, i + 1, seed)[i];
          want_max = std::max(want_max, value);
          want64 += value;
          want_bf16 += from_bf16(to_bf16(value));
          want_integer += (int64_t{1} << 60) / (r + 1) + i;
        }
        if (i >= 50) break;
        EXPECT_EQ(max[i], want_max);
        EXPECT_EQ(sum64[i], want64);
        EXPECT_EQ(integers[i], want_integer);
        EXPECT_EQ(bf16[i], to_bf16(want_bf16)) << from_bf16(bf16[i]) << " " << want_bf16;
      }
    }
    for (int root = 0; root < size; ++root) {
      std::vector<float> data = values_of(rank, count, seed);
      group->broadcast(bytes_of(data), root)->wait();
      EXPECT_EQ(data, values_of(root, count, seed));
    }
    group->barrier();
  }
}

/// A NaN on one rank reaches all, through sums and maxima: decisions such as "skip this step" must be global.
inline void nan_reaches_every_rank(Transport& transport) {
  CommunicatorPtr group = transport.open("nan", all_ranks(transport));
  for (int bad = 0; bad < group->size(); ++bad) {
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
      std::vector<double> data = {1, group->rank() == bad ? std::nan("") : 2};
      group->all_reduce(bytes_of(data), ElementType::kFloat64, op)->wait();
      EXPECT_TRUE(std::isnan(data[1])) << "rank " << group->rank() << " bad " << bad;
      EXPECT_FALSE(std::isnan(data[0]));
    }
  }
}

/// Groups of odd and of even ranks; the first call in each is an exchange.
inline void sub_groups_are_separate(Transport& transport) {
  std::vector<int> even, odd;
  for (int r = 0; r < transport.size(); ++r) (r % 2 ? odd : even).push_back(r);
  CommunicatorPtr mine, other;
  for (const auto* members : {&even, &odd}) {
    if (members->empty()) continue;
    CommunicatorPtr group = transport.open(members == &even ? "even" : "odd", *members);
    const bool member = transport.rank() % 2 == (members == &odd);
    EXPECT_EQ(group != nullptr, member);
    if (member) mine = group;
  }
  CommunicatorPtr all = transport.open("all", all_ranks(transport));
  const int to = (mine->rank() + 1) % mine->size(),
            from = (mine->rank() + mine->size() - 1) % mine->size();
  const std::vector<int> sent = {transport.rank()};
  std::vector<int> got = {-1};
  WorkPtr hop = mine->exchange(to, {bytes_of(sent)}, from, {bytes_of(got)});
  // Under way on another communicator at the same time.
  std::vector<int64_t> sum = {1};
  WorkPtr reduce = all->all_reduce(bytes_of(sum), ElementType::kInt64, ReduceOp::kSum);
  hop->wait();
  reduce->wait();
  EXPECT_EQ(got[0], (transport.rank() % 2 ? odd : even)[static_cast<size_t>(from)]);
  EXPECT_EQ(sum[0], transport.size());
}

/// A reduction of one purpose and a ring of another, many times, waited for late: neither order nor data get mixed.
inline void purposes_do_not_mix(Transport& transport) {
  CommunicatorPtr ring = transport.open("ring", all_ranks(transport));
  CommunicatorPtr gradients = transport.open("gradients", all_ranks(transport));
  const int rank = ring->rank(), size = ring->size();
  const int to = (rank + 1) % size, from = (rank + size - 1) % size;
  constexpr int kSteps = 20;
  std::vector<std::vector<float>> sent, got, sums;
  for (int i = 0; i < kSteps; ++i) {
    sent.push_back(values_of(rank, 200, static_cast<uint32_t>(i)));
    got.emplace_back(200, 0.f);
    sums.push_back(values_of(rank, 333, static_cast<uint32_t>(i)));
  }
  std::vector<WorkPtr> reductions;
  for (int i = 0; i < kSteps; ++i) {
    WorkPtr hop = ring->exchange(to, {bytes_of(std::as_const(sent[i]))}, from, {bytes_of(got[i])});
    reductions.push_back(
        gradients->all_reduce(bytes_of(sums[i]), ElementType::kFloat32, ReduceOp::kSum));
    if (i % 3 == 0) reductions.back()->wait();
    hop->wait();
  }
  for (WorkPtr& work : reductions) work->wait();
  for (int i = 0; i < kSteps; ++i) {
    EXPECT_EQ(got[i], values_of(from, 200, static_cast<uint32_t>(i)));
    EXPECT_EQ(sums[i], sum_of(size, 333, static_cast<uint32_t>(i)));
  }
}

inline void counters_count_payload(Transport& transport) {
  CommunicatorPtr group = transport.open("counted", all_ranks(transport));
  const int rank = group->rank(), size = group->size();
  const int64_t n = 12;  // floats; divisible by every size tested
  std::vector<float> a(n), b(n);
  std::vector<std::vector<float>> parts(static_cast<size_t>(size), std::vector<float>(n));
  std::vector<Buffer> to;
  std::vector<ConstBuffer> from;
  for (auto& part : parts) {
    to.push_back(bytes_of(part));
    from.push_back(bytes_of(std::as_const(part)));
  }
  int64_t expected = 0;
  group
      ->exchange((rank + 1) % size, {bytes_of(std::as_const(a))}, (rank + size - 1) % size,
                 {bytes_of(b)})
      ->wait();
  EXPECT_EQ(group->counters().bytes_sent, expected += size > 1 ? 4 * n : 0);
  group->all_gather(bytes_of(std::as_const(a)), to)->wait();
  EXPECT_EQ(group->counters().bytes_sent, expected += (size - 1) * 4 * n);
  group->reduce_scatter(from, bytes_of(a), ElementType::kFloat32)->wait();
  EXPECT_EQ(group->counters().bytes_sent, expected += (size - 1) * 4 * n);
  group->all_reduce(bytes_of(a), ElementType::kFloat32, ReduceOp::kSum)->wait();
  EXPECT_EQ(group->counters().bytes_sent, expected += 2 * (size - 1) * 4 * n / size);
  group->broadcast(bytes_of(a), 0)->wait();
  EXPECT_EQ(group->counters().bytes_sent, expected += rank == 0 ? (size - 1) * 4 * n : 0);
  group->barrier();
  EXPECT_EQ(group->counters().bytes_sent, expected);
  EXPECT_EQ(group->counters().calls, 6);
}

/// Arguments that contradict themselves are refused on the calling rank before anything is sent.
inline void wrong_arguments_are_refused(Transport& transport) {
  CommunicatorPtr group = transport.open("refusing", all_ranks(transport));
  const int size = group->size();
  std::vector<float> a(4), b(3);
  EXPECT_THROW(group->exchange(size, {}, 0, {}), InvalidArgument);
  EXPECT_THROW(group->exchange(0, {}, -1, {}), InvalidArgument);
  EXPECT_THROW(group->broadcast(bytes_of(a), size), InvalidArgument);
  EXPECT_THROW(group->all_reduce(Buffer{a.data(), 7}, ElementType::kFloat32, ReduceOp::kSum),
               InvalidArgument);
  EXPECT_THROW(group->all_gather(bytes_of(std::as_const(a)), {}), InvalidArgument);
  std::vector<Buffer> uneven(static_cast<size_t>(size), bytes_of(b));
  EXPECT_THROW(group->all_gather(bytes_of(std::as_const(a)), uneven), InvalidArgument);
  EXPECT_THROW(group->reduce_scatter(
                   std::vector<ConstBuffer>(static_cast<size_t>(size), bytes_of(std::as_const(b))),
                   bytes_of(a), ElementType::kFloat32),
               InvalidArgument);
  EXPECT_THROW(transport.open("empty", {}), InvalidArgument);
  EXPECT_THROW(transport.open("unordered", {0, 0}), InvalidArgument);
  EXPECT_THROW(transport.open("outside", {transport.size()}), InvalidArgument);
  EXPECT_EQ(group->counters().calls, 0);
  group->barrier();
}

inline void all_laws(Transport& transport) {
  exchanges_arrive_in_order(transport);
  collectives_equal_their_definition(transport);
  nan_reaches_every_rank(transport);
  sub_groups_are_separate(transport);
  purposes_do_not_mix(transport);
  counters_count_payload(transport);
  wrong_arguments_are_refused(transport);
}

/// The text of the error that `call` throws; fails the test where it throws none.
template <typename Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  ADD_FAILURE() << "expected an error";
  return {};
}

}  // namespace mtraining::comm::laws
