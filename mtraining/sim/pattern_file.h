// OffsetPattern: a vertical-slash pattern written down as token offsets and columns per query head.
//
// In:   JSON {"name", "seq_len", "heads": [{"offset_ranges": [[lo, hi), ..], "columns": [..]},
//       ..]}; or heads {"key_blocks": [[..], ..]}, of patterns that choose blocks one by one.
// Out:  the block diagonals that the offsets touch, and an index::Index.
// Next: imbalance.h counts its pairs; cli/ prints tables; bench/ runs it.
//
// A query at position i attends to key i - o for every offset o of a range and to every column j <=
// i. In 64x64 blocks an offset o lies on diagonal floor(o / 64) and, off the grid, on the next one
// too.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "mtraining/index/index.h"

namespace mtraining::sim {

struct OffsetRange {
  int64_t begin = 0, end = 0;  ///< token offsets [begin, end)
};

struct OffsetHead {
  std::vector<OffsetRange> offset_ranges;
  std::vector<int32_t> columns;  ///< key positions
};

struct OffsetPattern {
  std::string name;
  int64_t seq_len = 0;
  std::vector<OffsetHead> heads;
};

/// Errors: InvalidArgument naming `where`, the head, the list and the entry: not that JSON form, a
/// key missing or unknown, an empty or negative range, an offset or column at or beyond seq_len.
OffsetPattern parse_pattern(std::string_view json, const std::string& where);
/// Errors: as parse_pattern; also where the file is missing.
OffsetPattern read_pattern_file(const std::filesystem::path& path);

struct NamedIndex {
  std::string name;
  index::Index index;  ///< batch 1
};
/// Of either form. key_blocks: for each query block of 64 tokens its key blocks, ascending, none after it. Errors: as parse_pattern.
NamedIndex parse_index(std::string_view json, const std::string& where);
NamedIndex read_index_file(const std::filesystem::path& path);

/// Ascending block diagonals below num_blocks that the head's offsets touch.
std::vector<int32_t> block_diagonals(const OffsetHead& head, int64_t num_blocks);
/// Batch 1.
index::Index to_index(const OffsetPattern& pattern);

}  // namespace mtraining::sim
