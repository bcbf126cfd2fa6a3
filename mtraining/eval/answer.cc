#include "mtraining/eval/answer.h"

#include <algorithm>
#include <cmath>

#include "mtraining/base/check.h"

namespace mtraining::eval {
namespace {

bool is_found(const std::vector<std::vector<int64_t>>& spellings,
              const std::vector<int64_t>& output) {
  return std::any_of(spellings.begin(), spellings.end(), [&](const std::vector<int64_t>& ids) {
    return std::search(output.begin(), output.end(), ids.begin(), ids.end()) != output.end();
  });
}

}  // namespace

Answer answer(const Sample& sample, const Model& model) {
  Answer made;
  if (sample.is_choice()) {
    made.log_likelihoods = model.option_log_likelihoods(sample);
    MT_ASSERT(made.log_likelihoods.size() == sample.options.size(), "one for each option");
    for (const double value : made.log_likelihoods)
      MT_ASSERT(!std::isnan(value), "a log-likelihood of ", sample.facts.id);
    const auto best = std::max_element(made.log_likelihoods.begin(), made.log_likelihoods.end());
    made.choice = best - made.log_likelihoods.begin();
    made.score = std::count(sample.correct.begin(), sample.correct.end(), *made.choice) > 0 ? 1 : 0;
    return made;
  }
  made.output = model.generate(sample);
  if (sample.answers.empty()) return made;
  const auto found =
      std::count_if(sample.answers.begin(), sample.answers.end(),
                    [&](const auto& spellings) { return is_found(spellings, made.output); });
  made.score = sample.any ? static_cast<double>(found > 0)
                          : static_cast<double>(found) / static_cast<double>(sample.answers.size());
  return made;
}

}  // namespace mtraining::eval
