#include "mtraining/sim/pattern_file.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "mtraining/base/check.h"
#include "mtraining/base/json.h"
#include "mtraining/layout/layout.h"

namespace mtraining::sim {
namespace {

using layout::kBlock;
using Json = nlohmann::json;

const Json& member(const Json& object, const char* key, const std::string& where) {
  MT_CHECK_ARG(object.is_object(), where, ": expected an object, got ", object.type_name());
  const auto found = object.find(key);
  MT_CHECK_ARG(found != object.end(), where, ": expected key '", key, "', found none");
  return *found;
}

const Json& list(const Json& object, const char* key, const std::string& where) {
  const Json& value = member(object, key, where);
  MT_CHECK_ARG(value.is_array(), where, ": ", key, ": expected a list, got ", value.type_name());
  return value;
}

void check_keys(const Json& object, std::initializer_list<std::string_view> known,
                const std::string& where) {
  for (const auto& [key, value] : object.items()) {
    MT_CHECK_ARG(std::find(known.begin(), known.end(), key) != known.end(), where, ": unknown key ",
                 in_quotes(key));
  }
}

/// A value as it stands in the file, fit for a message: ASCII, cut after 120 bytes.
std::string shown(const Json& value) {
  const std::string text = value.dump(-1, ' ', true);
  return text.size() > 120 ? text.substr(0, 120) + ".." : text;
}

/// A whole number in [low, high].
int64_t whole(const Json& value, int64_t low, int64_t high, const std::string& where) {
  MT_CHECK_ARG(value.is_number_integer(), where, ": expected a whole number, got ", shown(value));
  const bool above = value.is_number_unsigned() &&
                     value.get<uint64_t>() > static_cast<uint64_t>(std::max<int64_t>(high, 0));
  MT_CHECK_ARG(!above && value.get<int64_t>() >= low && value.get<int64_t>() <= high, where,
               ": expected a number in [", low, ", ", high, "], got ", value.dump());
  return value.get<int64_t>();
}

OffsetHead parse_head(const Json& json, int64_t seq_len, const std::string& where) {
  OffsetHead head;
  const Json& ranges = list(json, "offset_ranges", where);
  check_keys(json, {"offset_ranges", "columns"}, where);
  for (size_t i = 0; i < ranges.size(); ++i) {
    const auto at = concat(where, ": offset_ranges[", i, "]");
    MT_CHECK_ARG(ranges[i].is_array() && ranges[i].size() == 2, at, ": expected [begin, end), got ",
                 shown(ranges[i]));
    const int64_t begin = whole(ranges[i][0], 0, seq_len - 1, at);
    head.offset_ranges.push_back({begin, whole(ranges[i][1], begin + 1, seq_len, at)});
  }
  const Json& columns = list(json, "columns", where);
  head.columns.reserve(columns.size());
  for (size_t i = 0; i < columns.size(); ++i) {
    head.columns.push_back(static_cast<int32_t>(
        whole(columns[i], 0, seq_len - 1, concat(where, ": columns[", i, "]"))));
  }
  return head;
}

/// What both forms begin with.
struct Start {
  std::string name;
  int64_t seq_len = 0;
  const Json& heads;
};
Start parse_start(const Json& json, const std::string& where) {
  const Json& name = member(json, "name", where);
  MT_CHECK_ARG(name.is_string(), where, ": name: expected text, got ", name.type_name());
  check_keys(json, {"name", "seq_len", "heads"}, where);
  const int64_t seq_len = whole(member(json, "seq_len", where), 1,
                                std::numeric_limits<int32_t>::max(), concat(where, ": seq_len"));
  const Json& heads = list(json, "heads", where);
  MT_CHECK_ARG(!heads.empty(), where, ": heads: expected at least one, got none");
  return {name.get<std::string>(), seq_len, heads};
}

OffsetPattern pattern_of(const Json& json, const std::string& where) {
  const Start start = parse_start(json, where);
  OffsetPattern pattern{start.name, start.seq_len, {}};
  for (size_t h = 0; h < start.heads.size(); ++h) {
    pattern.heads.push_back(
        parse_head(start.heads[h], pattern.seq_len, concat(where, ": heads[", h, "]")));
  }
  return pattern;
}

/// Adds a head's lists.
void parse_key_blocks(const Json& json, int64_t num_blocks, const std::string& where,
                      index::BlockRows& rows) {
  const Json& lists = list(json, "key_blocks", where);
  check_keys(json, {"key_blocks"}, where);
  MT_CHECK_ARG(static_cast<int64_t>(lists.size()) == num_blocks, where, ": key_blocks: expected ",
               num_blocks, " lists, one a block of 64 tokens, got ", lists.size());
  for (int64_t q = 0; q < num_blocks; ++q) {
    const auto at = concat(where, ": key_blocks[", q, "]");
    MT_CHECK_ARG(lists[q].is_array(), at, ": expected a list, got ", lists[q].type_name());
    int64_t least = 0;
    for (size_t i = 0; i < lists[q].size(); ++i) {
      MT_CHECK_ARG(least <= q, at, ": expected ascending blocks up to ", q, ", got ",
                   shown(lists[q]));
      const int64_t block = whole(lists[q][i], least, q, concat(at, "[", i, "]"));
      rows.key_blocks.push_back(static_cast<int32_t>(block));
      least = block + 1;
    }
    rows.row_begin.push_back(static_cast<int64_t>(rows.key_blocks.size()));
  }
}

}  // namespace

OffsetPattern parse_pattern(std::string_view text, const std::string& where) {
  return pattern_of(parse_json(text, where), where);
}

NamedIndex parse_index(std::string_view text, const std::string& where) {
  const Json json = parse_json(text, where);
  const Start start = parse_start(json, where);
  if (!start.heads[0].is_object() || !start.heads[0].contains("key_blocks"))
    return {start.name, to_index(pattern_of(json, where))};
  index::BlockRows rows;
  rows.row_begin = {0};
  for (size_t h = 0; h < start.heads.size(); ++h) {
    parse_key_blocks(start.heads[h], (start.seq_len + kBlock - 1) / kBlock,
                     concat(where, ": heads[", h, "]"), rows);
  }
  return {start.name, index::make_block_index(1, static_cast<int>(start.heads.size()),
                                              start.seq_len, std::move(rows))};
}

NamedIndex read_index_file(const std::filesystem::path& path) {
  return parse_index(read_text_file(path), path.string());
}

OffsetPattern read_pattern_file(const std::filesystem::path& path) {
  return parse_pattern(read_text_file(path), path.string());
}

std::vector<int32_t> block_diagonals(const OffsetHead& head, int64_t num_blocks) {
  // Offsets [begin, end) touch floor(begin / 64) .. ceil((end - 1) / 64): a run without gaps.
  std::vector<std::pair<int64_t, int64_t>> runs;
  for (const OffsetRange& range : head.offset_ranges) {
    runs.push_back({range.begin / kBlock, (range.end - 1 + kBlock - 1) / kBlock});
  }
  std::sort(runs.begin(), runs.end());
  std::vector<int32_t> diagonals;
  int64_t next = 0;
  for (const auto& [first, last] : runs) {
    for (int64_t c = std::max(first, next); c <= std::min(last, num_blocks - 1); ++c) {
      diagonals.push_back(static_cast<int32_t>(c));
    }
    next = std::max(next, last + 1);
  }
  return diagonals;
}

index::Index to_index(const OffsetPattern& pattern) {
  const int64_t num_blocks = (pattern.seq_len + kBlock - 1) / kBlock;
  std::vector<std::vector<int32_t>> diagonals, columns;
  for (const OffsetHead& head : pattern.heads) {
    diagonals.push_back(block_diagonals(head, num_blocks));
    columns.push_back(head.columns);
  }
  return index::make_index(1, static_cast<int>(pattern.heads.size()), pattern.seq_len,
                           std::move(diagonals), std::move(columns));
}

}  // namespace mtraining::sim
