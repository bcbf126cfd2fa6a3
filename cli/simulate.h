// mtraining simulate: what a ring costs, from a closed form, a pattern file, or both; needs no GPU and
// no process group.
//
// In:   --topology and times, or a pattern.
// Out:  totals, an imbalance table, bytes, a timeline, as text, JSON or a trace.
// Next: ui.perfetto.dev opens the trace.
#pragma once

namespace mtraining::cli {

/// argv[0] is the verb. Prints to standard output; returns the exit code.
/// Errors: InvalidArgument, Unsupported: the caller prints one line and exits 2.
int run_simulate(int argc, char** argv);

}  // namespace mtraining::cli
