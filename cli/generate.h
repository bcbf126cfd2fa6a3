// Generate: continues lines of token ids greedily with a checkpoint's weights.
//
// In:   the command line after `mtraining`; JSON lines with "ids". Out: the same lines with "output". Next: python -m mtraining.generate
//       takes text.
#pragma once

namespace mtraining::cli {

/// Errors: InvalidArgument, Unsupported for what the command line or its files have wrong.
int run_generate(int argc, char** argv);

}  // namespace mtraining::cli
