// Words: what users write for the values of a choice, each word in one table beside its enumeration.
//
// In:   a table `inline constexpr Word<Kind> kKindWords[] = {{"first", Kind::kFirst}, ..}`, a value or a word.
// Out:  the value of a word, the word of a value, the list of words for a sentence. Next: layout/layout.h, ring/schedule.h,
// pattern/pattern.h, attention/ring_attention.h; cli/config_file.cc reads and writes keys by the same tables.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "mtraining/base/check.h"

namespace mtraining {

template <typename Value>
struct Word {
  std::string_view text;
  Value value;
};

/// None where no value has that word.
template <typename Value, size_t kCount>
std::optional<Value> value_of(const Word<Value> (&words)[kCount], std::string_view text) {
  for (const Word<Value>& word : words) {
    if (word.text == text) return word.value;
  }
  return std::nullopt;
}

/// Errors: InternalError where the table lacks the value.
template <typename Value, size_t kCount>
std::string_view word_of(const Word<Value> (&words)[kCount], Value value) {
  for (const Word<Value>& word : words) {
    if (word.value == value) return word.text;
  }
  MT_ASSERT(false, "no word for value ", static_cast<int>(value), " beside ", words[0].text);
}

/// All words in the table's order, `last` before the last one: "flat or hierarchical".
template <typename Value, size_t kCount>
std::string listed(const Word<Value> (&words)[kCount], std::string_view between,
                   std::string_view last, std::string_view quote = "") {
  std::string text;
  for (size_t i = 0; i < kCount; ++i) {
    text += concat(i == 0 ? "" : i + 1 == kCount ? last : between, quote, words[i].text, quote);
  }
  return text;
}

/// Errors: InvalidArgument: `key: expected first | second, got "other"`.
template <typename Value, size_t kCount>
Value parse_word(std::string_view key, std::string_view text, const Word<Value> (&words)[kCount]) {
  const std::optional<Value> value = value_of(words, text);
  MT_CHECK_ARG(value, key, ": expected ", listed(words, " | ", " | "), ", got \"", text, "\"");
  return *value;
}

}  // namespace mtraining
