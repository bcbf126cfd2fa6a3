// Inspect: what a token file, a file of weights, a checkpoint or a run's folder holds, without loading it.
//
// In:   the command line after `mtraining`. Out: facts on standard output. Next: the reader.
#pragma once

namespace mtraining::cli {

/// Errors: InvalidArgument, one sentence, for what is none of these, truncated or of another program.
int run_inspect(int argc, char** argv);

}  // namespace mtraining::cli
