// Nearest: the known word that a mistyped one was probably meant to be.
//
// In:   a word, the known words. Out: the closest one by edits. Next: error messages of config_file.cc and main.cc.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace mtraining::cli {

/// The known word with the fewest edits (the first of equals). Empty where `known` is empty.
std::string nearest(std::string_view word, const std::vector<std::string>& known);

}  // namespace mtraining::cli
