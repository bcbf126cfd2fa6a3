#include "cli/parse_options.h"

#include <vector>

#include "cli/nearest.h"
#include "mtraining/base/check.h"

namespace mtraining::cli {
namespace {

/// A parser's error in this project's words: the option, what it takes, what it was given.
std::string mistake(const CLI::App& app, const std::string& verb, const CLI::ParseError& error) {
  const std::string said = error.what();
  const CLI::Option* about = nullptr;
  for (const CLI::Option* option : app.get_options()) {
    const std::string& name = option->get_name();
    if (said.find(name) == std::string::npos) continue;
    if (about == nullptr || name.size() > about->get_name().size()) about = option;
  }
  if (about == nullptr) return concat(verb, ": ", said);
  const std::string type = about->get_type_name();
  const char* expected = type.find("FLOAT") != std::string::npos ? "one number"
                         : type.find("INT") != std::string::npos ? "one whole number"
                         : about->get_items_expected_max() == 0  ? "no value"
                                                                 : "one text";
  if (about->get_items_expected_max() > 1) {
    expected = type.find("FLOAT") != std::string::npos ? "numbers"
               : type.find("INT") != std::string::npos ? "whole numbers"
                                                       : "texts";
  }
  std::string got;
  for (const std::string& result : about->results())
    got += concat(got.empty() ? "'" : ", '", result, "'");
  return concat(about->get_name(), ": expected ", expected, ", got ", got.empty() ? "none" : got);
}

}  // namespace

bool parse_options(CLI::App& app, const std::string& verb, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    app.exit(help);
    return false;
  } catch (const CLI::ExtrasError&) {
    const std::vector<std::string> extra = app.remaining();
    std::vector<std::string> known;
    for (const CLI::Option* option : app.get_options()) known.push_back(option->get_name());
    throw InvalidArgument(
        concat(verb, ": unknown option ", extra.empty() ? "" : extra.front(),
               "; nearest known option: ", nearest(extra.empty() ? "" : extra.front(), known)));
  } catch (const CLI::ParseError& error) {
    throw InvalidArgument(mistake(app, verb, error));
  }
  return true;
}

}  // namespace mtraining::cli
