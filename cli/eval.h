// Eval: what weights are worth: the loss of a checkpoint over a token file, dense and with sparse patterns; its scores on long-context
// tests (eval_tasks.h).
//
// In:   the command line after `mtraining`. Out: one JSON object a pattern. Next: docs/evaluation.md.
#pragma once

namespace mtraining::cli {

/// Errors: InvalidArgument, Unsupported for what the command line or its files have wrong.
int run_eval(int argc, char** argv);

}  // namespace mtraining::cli
