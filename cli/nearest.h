// Nearest: the known word that a mistyped one was probably meant to be.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace mtraining::cli {

/// The known word with the fewest edits (the first of equals). Empty where `known` is empty.
std::string nearest(std::string_view word, const std::vector<std::string>& known);

}  // namespace mtraining::cli
