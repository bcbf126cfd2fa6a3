#include "bench/attention_case.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <utility>

#include "bench/rows.h"
#include "mtraining/base/check.h"
#include "mtraining/sim/pattern_file.h"
#include "mtraining/sim/pattern_shapes.h"
#include "mtraining/testing/generator.h"
#include "mtraining/testing/rounding.h"

namespace mtraining::bench {
namespace {

struct NamedType {
  std::string_view name;
  kernels::DType dtype;
  testing::Precision precision;
};
constexpr std::array<NamedType, 4> kTypes = {
    {{"float32", kernels::DType::kFloat32, testing::Precision::kFloat32},
     {"float64", kernels::DType::kFloat64, testing::Precision::kFloat64},
     {"bf16", kernels::DType::kBFloat16, testing::Precision::kBFloat16},
     {"fp16", kernels::DType::kFloat16, testing::Precision::kFloat16}}};

const NamedType& type_of(kernels::DType dtype) {
  return *std::find_if(kTypes.begin(), kTypes.end(),
                       [&](const NamedType& type) { return type.dtype == dtype; });
}

AlignedBytes pack(const std::vector<float>& values, testing::Precision precision) {
  const std::vector<uint8_t> packed =
      testing::pack(precision, std::vector<double>(values.begin(), values.end()));
  AlignedBytes bytes(static_cast<int64_t>(packed.size()));
  std::copy(packed.begin(), packed.end(), bytes.data());
  return bytes;
}

}  // namespace

void check(const AttentionSizes& sizes) {
  MT_CHECK_ARG(sizes.seq_len >= 1 && sizes.seq_len < int64_t{1} << 31,
               "--seq-len: expected a number from 1 to 2147483647, got ", sizes.seq_len);
  MT_CHECK_ARG(sizes.num_q_heads >= 1, "--heads: expected at least 1, got ", sizes.num_q_heads);
  MT_CHECK_ARG(sizes.num_kv_heads >= 1 && sizes.num_q_heads % sizes.num_kv_heads == 0,
               "--kv-heads: expected a divisor of the ", sizes.num_q_heads, " query heads, got ",
               sizes.num_kv_heads);
  MT_CHECK_ARG(sizes.head_dim >= 4 && sizes.head_dim <= 512 && sizes.head_dim % 2 == 0,
               "--head-dim: expected an even number from 4 to 512, got ", sizes.head_dim);
}

double scale_of(const AttentionSizes& sizes) {
  return 1 / std::sqrt(static_cast<double>(sizes.head_dim));
}

kernels::DType parse_dtype(std::string_view name) {
  std::string known;
  for (const NamedType& type : kTypes) {
    if (type.name == name) return type.dtype;
    known += concat(known.empty() ? "" : ", ", type.name);
  }
  throw InvalidArgument(concat("--dtype: expected one of ", known, ", got '", name, "'"));
}

std::string_view to_string(kernels::DType dtype) { return type_of(dtype).name; }

AttentionCase density_case(const AttentionSizes& sizes, double density) {
  MT_CHECK_ARG(density > 0 && density <= 1, "--density: expected a number in (0, 1], got ",
               density);
  const int heads = static_cast<int>(sizes.num_q_heads);
  if (density == 1) return {"dense", index::dense_index(1, heads, sizes.seq_len)};
  const int64_t num_blocks = (sizes.seq_len + 63) / 64;
  const auto build = [&](int64_t diagonals, int64_t columns, int num_heads) {
    std::vector<int32_t> diagonal_list, column_list;
    for (int64_t i = 0; i < std::min(diagonals, num_blocks); ++i) {
      const int64_t spread = (i - 1) * num_blocks / std::max<int64_t>(1, diagonals - 1) + 1;
      diagonal_list.push_back(static_cast<int32_t>(std::min(i < 2 ? i : spread, num_blocks - 1)));
    }
    for (int64_t i = 0; i < columns; ++i) {
      column_list.push_back(static_cast<int32_t>(i * sizes.seq_len / columns));
    }
    return index::make_index(1, num_heads, sizes.seq_len,
                             std::vector<std::vector<int32_t>>(num_heads, diagonal_list),
                             std::vector<std::vector<int32_t>>(num_heads, column_list));
  };
  int64_t diagonals = 1, columns = 0;
  while (diagonals < num_blocks &&
         index::density(build(diagonals + 1, 0, 1)) <= density / 2 + 1.0 / 512) {
    ++diagonals;
  }
  const int64_t step = std::max<int64_t>(1, sizes.seq_len / 1024);
  while (columns + step < sizes.seq_len &&
         index::density(build(diagonals, columns + step, 1)) <= density) {
    columns += step;
  }
  char name[64];
  std::snprintf(name, sizeof name, "density %g", density);
  return {name, build(diagonals, columns, heads)};
}

AttentionCase file_case(const AttentionSizes& sizes, const std::string& path) {
  const sim::OffsetPattern pattern = sim::read_pattern_file(path);
  MT_CHECK_ARG(static_cast<int64_t>(pattern.heads.size()) == sizes.num_q_heads, path,
               ": expected --heads ", pattern.heads.size(), " as in the file, got ",
               sizes.num_q_heads);
  MT_CHECK_ARG(pattern.seq_len == sizes.seq_len, path, ": expected --seq-len ", pattern.seq_len,
               " as in the file, got ", sizes.seq_len);
  return {pattern.name, sim::to_index(pattern)};
}

AttentionCase shape_case(const AttentionSizes& sizes, std::string_view shape) {
  return {std::string(shape), sim::to_index(sim::make_pattern(
                                  shape, sizes.seq_len, static_cast<int>(sizes.num_q_heads)))};
}

double total_pairs(const index::Index& index) {
  double pairs = 0;
  for (int b = 0; b < index.batch; ++b)
    for (int h = 0; h < index.num_q_heads; ++h)
      pairs += static_cast<double>(index::computed_pairs(index, b, h));
  return pairs;
}

AttentionInputs make_inputs(const AttentionSizes& sizes, uint64_t seed) {
  check(sizes);
  const testing::Qkv made = testing::make_qkv({.seq_len = sizes.seq_len,
                                               .num_q_heads = sizes.num_q_heads,
                                               .num_kv_heads = sizes.num_kv_heads,
                                               .head_dim = sizes.head_dim,
                                               .seed = seed});
  const testing::Precision precision = type_of(sizes.dtype).precision;
  AttentionInputs inputs{.q = pack(made.q, precision),
                         .k = pack(made.k, precision),
                         .v = pack(made.v, precision),
                         .dout = pack(made.dout, precision),
                         .digest = ""};
  std::string all;
  for (const auto* tensor : {&inputs.q, &inputs.k, &inputs.v, &inputs.dout})
    all += digest(tensor->data(), tensor->size());
  inputs.digest = digest(all.data(), static_cast<int64_t>(all.size()));
  return inputs;
}

}  // namespace mtraining::bench
