// EvalTasks: `mtraining eval needle|ruler|infinitebench`: a checkpoint's answers to the samples of a long-context test, and scores.
//
// In:   the command line after `mtraining eval`; a file of `python -m mtraining.tasks`. Out: a JSON object a sample, then means by
//       task, length and depth. Next: docs/evaluation.md; `python -m mtraining.tasks score`.
#pragma once

#include "mtraining/eval/samples.h"

namespace mtraining::cli {

/// argv[0] is the kind. Errors: InvalidArgument, Unsupported for what the command line or its files have wrong.
int run_eval_tasks(eval::Kind kind, int argc, char** argv);

}  // namespace mtraining::cli
