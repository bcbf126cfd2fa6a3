// Doctor: what this machine has for training, and what it lacks, with the remedy.
//
// In:   the command line after `mtraining`. Out: a report on standard output; 0 where training can run here, 1 where not.
// Next: the reader.
#pragma once

namespace mtraining::cli {

int run_doctor(int argc, char** argv);

}  // namespace mtraining::cli
