#include "cli/dry_run.h"

#include <c10/core/ScalarType.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iostream>

#include "cli/config_file.h"
#include "cli/printed.h"
#include "mtraining/base/check.h"
#include "mtraining/kernels/dispatch.h"
#include "mtraining/kernels/launch.h"
#include "mtraining/layout/layout.h"
#include "mtraining/topology/rendezvous.h"

namespace mtraining::cli {
namespace {

namespace fs = std::filesystem;

std::string size_text(double bytes) {
  constexpr double kMiB = 1024 * 1024;
  return bytes < 1024 * kMiB ? number("%.1f MiB", bytes / kMiB)
                             : number("%.1f GiB", bytes / kMiB / 1024);
}

kernels::DType kernel_dtype(at::ScalarType type) {
  return type == at::kBFloat16 ? kernels::DType::kBFloat16
         : type == at::kHalf   ? kernels::DType::kFloat16
                               : kernels::DType::kFloat32;
}

std::string ranks_text(const train::ResolvedRun& resolved,
                       const topology::LaunchEnvironment& launch, bool launching) {
  std::string text =
      concat("# ranks: ", launch.world_size, " (",
             launching                   ? "--nproc"
             : launch.launcher == "none" ? "this process"
                                         : launch.launcher,
             "), cp_size ", resolved.cp_size, " (", resolved.topology.nodes, " nodes of ",
             resolved.topology.ranks_per_node, "), dp_size ", resolved.dp_size);
  if (launching || launch.world_size == 1) return text;
  const topology::Rendezvous meeting = topology::find_rendezvous(launch);
  return concat(text, "; they meet at ", meeting.address, ":", meeting.ports.front(),
                meeting.port_is_given ? "" : " or one of the ports after it");
}

/// What stays from step to step; activations are not in it.
std::string memory_text(const train::RunConfig& config, int ranks) {
  const auto count = static_cast<double>(count_parameters(config.model));
  const double parts = config.parallel.zero == 2 ? ranks : 1;
  const auto weight = static_cast<double>(c10::elementSize(config.model.dtype));
  const auto gradient = static_cast<double>(c10::elementSize(config.optim.grad_dtype));
  // float32 weights that are not sharded are their own masters.
  const bool shared = config.model.dtype == at::kFloat && config.parallel.zero == 0;
  const double state = count * (8 + (shared ? 0 : 4)) / parts;
  return concat("# memory a rank, without activations: weights ", size_text(count * weight),
                ", gradients ", size_text(count * gradient / parts), ", masters and moments ",
                size_text(state));
}

std::string kernel_text(const train::RunConfig& config, at::Device device) {
  std::string text =
      device.is_cpu() ? "# kernels on the CPU:" : concat("# kernels on ", device, ":");
  for (const auto direction : {kernels::Direction::kForward, kernels::Direction::kBackward}) {
    kernels::Request request;
    request.direction = direction;
    request.dtype = kernel_dtype(config.model.dtype);
    request.head_dim = config.model.head_dim;
    if (!device.is_cpu()) request.device = kernels::current_cuda_device();
    const kernels::Choice choice = kernels::choose(request);
    text += concat(direction == kernels::Direction::kForward ? " " : ", ",
                   kernels::to_string(direction), " ", kernels::to_string(choice.backend), " ",
                   choice.tile);
  }
  return text;
}

/// The nearest folder that exists must take new names.
void check_writable(const std::string& out) {
  std::error_code error;
  fs::path folder = fs::absolute(out, error);
  while (!fs::exists(folder, error) && folder.has_relative_path()) folder = folder.parent_path();
  MT_CHECK_ARG(fs::is_directory(folder, error), "--out: ", out,
               " cannot be made: ", folder.string(), ": ", std::strerror(ENOTDIR));
  MT_CHECK_EXTERNAL(::access(folder.c_str(), W_OK | X_OK) == 0, "--out: ", out,
                    " cannot be written: ", folder.string(), ": ", std::strerror(errno));
}

std::string start_text(const Start& start, const std::string& out) {
  switch (start.kind) {
    case StartKind::kAnew:
      return concat("# start: anew, in ", out);
    case StartKind::kResume:
      return concat("# start: after train_step ", start.steps_done, " of ", start.checkpoint);
    case StartKind::kFinished:
      return concat("# start: nothing is left to do, ", start.checkpoint, " has all train steps");
  }
  return "";
}

}  // namespace

int64_t count_parameters(const model::DecoderConfig& m) {
  const model::OptionalTensors optional = model::optional_tensors(m);
  const int64_t q = m.num_attention_heads * m.head_dim, kv = m.num_key_value_heads * m.head_dim;
  int64_t layer = m.hidden_size * (2 * q + 2 * kv) + 3 * m.hidden_size * m.intermediate_size +
                  2 * m.hidden_size;
  if (optional.qkv_bias) layer += q + 2 * kv;
  if (optional.out_bias) layer += m.hidden_size;
  if (optional.qk_norm) layer += 2 * m.head_dim;
  const int64_t embeddings = (m.tie_word_embeddings ? 1 : 2) * m.vocab_size * m.hidden_size;
  return embeddings + m.num_hidden_layers * layer + m.hidden_size;
}

void print_dry_run(const train::RunConfig& config, const train::ResolvedRun& resolved,
                   const topology::LaunchEnvironment& launch, bool launching, const Start& start) {
  check_writable(config.out);
  const layout::Layout layout(train::ring_options(config, resolved).layout);
  const int64_t step_tokens = config.train.global_batch_size * config.train.seq_len;
  const std::string facts = concat(
      ranks_text(resolved, launch, launching), "\n# steps: ", resolved.steps, " train steps of ",
      resolved.accumulation, " micro-steps, ", step_tokens, " tokens each, ",
      resolved.steps * step_tokens, " in all\n# shard: ", layout.tokens_per_rank(),
      " tokens a rank (", layout.padded_len() - layout.seq_len(), " of padding a sequence)\n",
      "# model: ", count_parameters(config.model), " parameters\n",
      memory_text(config, launch.world_size), "\n", kernel_text(config, resolved.device), "\n",
      start_text(start, config.out), "\n");
  std::cout << to_toml(config) << "\n" << facts;
  for (const std::string& notice : start.notices) std::cout << "# " << notice << "\n";
}

}  // namespace mtraining::cli
