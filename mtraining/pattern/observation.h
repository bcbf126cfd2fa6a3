// Observation: rows of q whose attention over all keys is looked at, the same on every rank, ready for the window kernels.
//
// In:   this rank's q and k, the positions of the rows.
// Out:  the gathered rows, their maxima and fixed-point sums, masses by key, diagonal and offset, covered mass.
// Next: vertical_slash.cc chooses from the masses, recall.cc judges a choice by covered mass.
//
// Every function is collective over the group. Host memory; O(rows * D + n + NB), never rows * N.
#pragma once

#include <cstdint>
#include <vector>

#include "mtraining/comm/transport.h"
#include "mtraining/kernels/window.h"
#include "mtraining/pattern/pattern.h"

namespace mtraining::pattern {

/// The observation rows of the options, ascending. One document: the last min(last_q, N) positions, or as many spread evenly, the
/// last one included. Several (document_starts [N] of one sample), window "last": the last rows of each document, last_q of
/// the longest and of the others in proportion to their lengths, at least one; none of documents that the local
/// diagonals cover whole (one document's rule where they cover all); at most max_window_rows. docs/math/pattern.md says why.
std::vector<int32_t> window_positions(const VerticalSlashOptions& options, int64_t seq_len,
                                      const int32_t* document_starts = nullptr);
/// Seed of the rows that recall_floor judges by: any constant, the same on every rank and in every run.
inline constexpr uint64_t kFloorSeed = 0x6d7472;
/// What window_positions never exceeds with documents.
int64_t max_window_rows(const VerticalSlashOptions& options);
/// What every pattern asks of its inputs, before any communication; `pattern` is for messages. Errors: InvalidArgument,
/// Unsupported.
void check_local(const char* pattern, const LocalAttention& local, comm::Communicator& group);
/// Sample b alone. Its window may differ from other samples'.
LocalAttention sample_of(const LocalAttention& local, int64_t b);
/// True where each sample has a window of its own, and so an Observation of its own.
bool has_windows_by_sample(const LocalAttention& local, const VerticalSlashOptions& options);

/// `count` ascending positions outside `window` (ascending), one at random in each of `count` equal parts of what remains; all of
/// it where it has no more.
std::vector<int32_t> sampled_positions(const std::vector<int32_t>& window, int64_t seq_len,
                                       int64_t count, uint64_t seed);

/// The rows that recall_floor judges by: sampled_positions by a seed of its own, or the window where there are no others.
std::vector<int32_t> floor_positions(const VerticalSlashOptions& options,
                                     const std::vector<int32_t>& window, int64_t seq_len);

class Observation {
 public:
  /// Gathers the rows and computes row maxima and sums. Messages: [B, H, R, D] of q's dtype, R row maxima and sums a head.
  /// Errors: InvalidArgument on every rank alike where q (observed rows) or k holds NaN, inf or values from 2^50 on.
  Observation(const LocalAttention& local, std::vector<int32_t> row_positions,
              comm::Communicator& group);
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;

  int64_t num_rows() const { return static_cast<int64_t>(positions_.size()); }

  struct Masses {
    std::vector<int64_t> columns;  ///< [B, H, n] of this rank's keys, summed over the rows
    std::vector<int64_t>
        diagonals;  ///< [B, H, NB + 1] of all ranks, in units of 2^-46: kernels::ref::WindowMasses
    std::vector<int64_t> offsets;  ///< [B, H, N] of all ranks; empty unless asked for
  };
  Masses masses(bool with_offsets) const;
  /// int64 [B, H, R], of all ranks: the mass of each row that `index` covers; a row's whole mass is kMassOne.
  std::vector<int64_t> covered(const index::Index& index) const;

 private:
  std::vector<int64_t> covered_by_blocks(const index::Index& index) const;
  void gather_rows();
  void check_values();
  void sum_over_ranks(std::vector<int64_t>& values) const;
  std::vector<int64_t> zeros(int64_t per_head) const;

  const LocalAttention& local_;
  comm::Communicator& group_;
  std::vector<int32_t> positions_;
  std::vector<int32_t> document_start_;  // [B, R]
  std::vector<int32_t> key_block_starts_;
  std::vector<uint8_t> rows_;  // [B, H, R, D] of local.dtype
  std::vector<float> row_max_;
  std::vector<int64_t> row_sum_;
  kernels::WindowParams params_;
};

}  // namespace mtraining::pattern
