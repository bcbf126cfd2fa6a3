// ParseOptions: a verb's options through CLI11, with its mistakes in this project's words.
//
// In:   a CLI::App whose name is "mtraining VERB ..", the command line. Out: filled options, or InvalidArgument. Next: the verb.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace mtraining::cli {

/// False where --help was asked for and printed. argv[0] is not read. Errors: InvalidArgument: an unknown option with the
/// nearest known one; a value missing or of another type.
bool parse_options(CLI::App& app, const std::string& verb, int argc, char** argv);

}  // namespace mtraining::cli
