// Follows one token of one sequence through every stage and prints what it meets: the numbers of docs/walkthrough.md.
//
// 512 byte tokens, 4 ranks (2 nodes of 2, as threads), a decoder of one layer with two query heads on one kv head. Every
// number comes from the code that trains; checks/walkthrough_test.py holds the document against this output.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "mtraining/attention/autograd.h"
#include "mtraining/comm/loopback.h"
#include "mtraining/data/batches.h"
#include "mtraining/index/step_index.h"
#include "mtraining/index/step_pairs.h"
#include "mtraining/kernels/attention_kernels.h"
#include "mtraining/model/decoder.h"
#include "mtraining/optim/adamw.h"
#include "mtraining/optim/flat_parameters.h"
#include "mtraining/train/loss.h"

namespace {

using namespace mtraining;  // a program that touches every folder

constexpr int64_t kSeqLen = 512, kFollowed = 345;
constexpr int kRanks = 4, kHead = 1;

/// 513 bytes of plain text.
std::string text() {
  const std::string sentence =
      "Attention to far tokens is rare: most of a head's mass lies on a few columns and on a few "
      "diagonals. ";
  std::string all;
  for (int i = 0; all.size() <= kSeqLen; ++i) all += std::to_string(i * i) + ". " + sentence;
  return all.substr(0, kSeqLen + 1);
}

std::string write_tokens(const std::filesystem::path& folder) {
  const std::string prefix = (folder / "text").string(), bytes = text();
  data::TokenFileWriter writer(prefix, data::TokenType::kUInt8);
  std::vector<int64_t> ids;
  for (const char c : bytes) ids.push_back(static_cast<uint8_t>(c));
  writer.add_sequence(ids);
  writer.finish();
  return prefix;
}

void print_list(const char* name, std::span<const int32_t> values) {
  std::printf("%s (%zu):", name, values.size());
  for (const int32_t value : values) std::printf(" %d", value);
  std::printf("\n");
}

void print_values(const char* name, const at::Tensor& values) {
  std::printf("%s:", name);
  const at::Tensor flat = values.detach().to(at::kDouble).reshape({-1}).contiguous();
  for (int64_t i = 0; i < flat.numel(); ++i) std::printf(" %.3f", flat.const_data_ptr<double>()[i]);
  std::printf("\n");
}

model::DecoderConfig decoder_config() {
  model::DecoderConfig config;
  config.vocab_size = 256;
  config.hidden_size = 32;
  config.intermediate_size = 64;
  config.num_hidden_layers = 1;
  config.num_attention_heads = 2;
  config.num_key_value_heads = 1;
  config.head_dim = 16;
  config.initializer_range = 0.3;  // large, so that an untrained head already has opinions
  config.embedding_initializer_range = 0.2;
  return config;
}

attention::AttentionPattern pattern_options() {
  attention::AttentionPattern pattern;
  pattern.vertical_slash.p_vertical = 0.3;
  pattern.vertical_slash.p_slash = 0.3;
  pattern.vertical_slash.sink_tokens = 2;
  pattern.vertical_slash.local_blocks = 1;
  return pattern;
}

/// The state of one row after each launch of its rank, by the kernels alone: sources in the order of the schedule.
void print_state_by_launch(attention::RingContext& context, const index::Index& index,
                           const std::vector<at::Tensor>& q, const std::vector<at::Tensor>& k,
                           const std::vector<at::Tensor>& v, int64_t offset) {
  const layout::Layout& layout = context.layout();
  const int rank = context.cp_rank();
  const int64_t n = layout.tokens_per_rank();
  const auto view = [](const at::Tensor& t) {
    return kernels::ConstView{t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
  };
  at::Tensor out = at::zeros({1, n, 2, 16}), lse = at::zeros({1, 2, n});
  const index::DiagonalBitmap bitmap = index::diagonal_bitmap(index);
  const std::vector<int32_t> q_starts = layout.block_starts(rank);
  kernels::ForwardParams params;
  params.batch = 1;
  params.num_q_heads = 2;
  params.num_kv_heads = 1;
  params.head_dim = 16;
  params.num_queries = n;
  params.softmax_scale = 0.25;
  params.seq_len = kSeqLen;
  params.q = view(q[rank]);
  params.q_block_starts = q_starts.data();
  params.diagonal_bits = bitmap.bits.data();
  params.diagonal_words = bitmap.words;
  params.out = {out.data_ptr(), out.stride(0), out.stride(1), out.stride(2)};
  params.lse = lse.data_ptr();
  const auto launch = [&](const std::string& what, const std::vector<kernels::KeySource>& sources) {
    params.sources = sources.data();
    params.num_sources = static_cast<int>(sources.size());
    kernels::ref::forward(params);
    params.first = false;
    std::printf("after %s: lse %.4f, out %.4f %.4f %.4f ..\n", what.c_str(),
                lse[0][kHead][offset].item<double>(), out[0][offset][kHead][0].item<double>(),
                out[0][offset][kHead][1].item<double>(), out[0][offset][kHead][2].item<double>());
  };
  std::vector<kernels::KeySource> columns;
  std::vector<index::StepColumns> column_lists(kRanks);
  const ring::ScheduleOptions options{.topology = context.topology()};
  for (const ring::Op& op : ring::forward_schedule(options, rank).ops) {
    if (op.kind != ring::OpKind::kLaunch) continue;
    std::vector<kernels::KeySource> sources;
    std::vector<index::StepBlocks> blocks;
    std::vector<std::vector<int32_t>> starts;
    blocks.reserve(op.sources.size());
    starts.reserve(op.sources.size());
    std::string what = "the launch over the shards of ranks";
    for (const ring::SourceRef& ref : op.sources) {
      blocks.push_back(index::step_blocks(index, layout, rank, ref.source_rank));
      starts.push_back(layout.block_starts(ref.source_rank));
      column_lists[ref.source_rank] = index::step_columns(index, layout, ref.source_rank);
      kernels::KeySource source;
      source.k = view(k[ref.source_rank]);
      source.v = view(v[ref.source_rank]);
      source.num_keys = n;
      kernels::KeySource column_source = source;
      source.block_starts = starts.back().data();
      source.blocks = blocks.back().view();
      column_source.columns = column_lists[ref.source_rank].view();
      sources.push_back(source);
      columns.push_back(column_source);
      what += " " + std::to_string(ref.source_rank);
    }
    launch(what, sources);
  }
  launch("the launch over all columns", columns);
}

void walk(comm::Transport& transport, const std::string& prefix) {
  at::set_num_threads(1);
  attention::RingOptions options;
  options.layout = {.seq_len = kSeqLen, .cp_size = kRanks, .stripe = 64};
  options.topology = topology::make_topology(kRanks, 2);
  attention::RingContext context(options, transport);
  const layout::Layout& layout = context.layout();
  const layout::Owner owner = layout.owner(kFollowed);
  const bool speaks = context.cp_rank() == owner.cp_rank;

  // 1 data, 2 layout
  data::BatchOptions batch_options;
  batch_options.sources = {{prefix, 1}};
  batch_options.seq_len = kSeqLen;
  batch_options.vocab_size = 256;
  const data::Batches batches(batch_options);
  const data::Batch batch = batches.batch(0, 0, layout, context.cp_rank());
  if (speaks) {
    const data::Batches::Sample sample = batches.sample(0);
    std::printf("position %ld: id %ld ('%c'), label %ld ('%c')\n", kFollowed, sample.ids[kFollowed],
                static_cast<char>(sample.ids[kFollowed]), sample.labels[kFollowed],
                static_cast<char>(sample.labels[kFollowed]));
    const int64_t stripe = kFollowed / 64;
    std::printf(
        "stripe %ld, residue %ld mod %d -> cp_rank %d (node %d, local_rank %d), offset %ld\n",
        stripe, stripe % kRanks, kRanks, owner.cp_rank, context.topology().node(owner.cp_rank),
        context.topology().local_rank(owner.cp_rank), owner.offset);
    std::printf("in the shard: id %ld, label %ld, position %ld\n",
                batch.ids[0][owner.offset].item<int64_t>(),
                batch.labels[0][owner.offset].item<int64_t>(),
                batch.positions[owner.offset].item<int64_t>());
  }

  // 3 model up to q, k, v; 4 pattern; 5 index; 6 the rank's part; 7 ring; 8 kernels
  const model::DecoderConfig config = decoder_config();
  model::DecoderParameters parameters = model::init_parameters(config, 7);
  optim::FlatParameters flat([&] {
    std::vector<optim::FlatParameters::Named> named;
    for (const model::Parameter& p : parameters.list()) named.push_back({p.name, p.value});
    return named;
  }());
  const model::Decoder decoder(config, parameters);
  at::Tensor local_q, local_out;
  std::shared_ptr<const index::Index> chosen;
  std::vector<at::Tensor> qkv(3);
  const model::Attend attend = [&](int64_t, const at::Tensor& q, const at::Tensor& k,
                                   const at::Tensor& v) {
    attention::AttentionCall call;
    call.pattern = pattern_options();
    const attention::AttentionOutput output =
        attention::sparse_ring_attention(context, q, k, v, call);
    chosen = output.index;
    qkv = {q.detach().contiguous(), k.detach().contiguous(), v.detach().contiguous()};
    local_q = q;
    local_q.retain_grad();
    local_out = output.out;
    return output.out;
  };
  const at::Tensor hidden = decoder.forward(batch.ids, batch.positions, attend);

  // The other ranks' shards, only to show the state between launches.
  std::vector<std::vector<at::Tensor>> shards(3, std::vector<at::Tensor>(kRanks));
  for (int part = 0; part < 3; ++part) {
    std::vector<comm::Buffer> buffers;
    for (int r = 0; r < kRanks; ++r) {
      shards[part][r] = at::empty_like(qkv[part]);
      buffers.push_back(
          {shards[part][r].data_ptr(), static_cast<int64_t>(shards[part][r].nbytes())});
    }
    context.index_group()
        .all_gather({qkv[part].data_ptr(), static_cast<int64_t>(qkv[part].nbytes())}, buffers)
        ->wait();
  }
  if (speaks) {
    print_values("q of head 1 after RoPE, first four",
                 qkv[0][0][owner.offset][kHead].slice(0, 0, 4));
    print_list("head 1 diagonals", chosen->diagonals.row(kHead));
    print_list("head 1 columns", chosen->columns.row(kHead));
    std::printf(
        "density: head 0 %.3f, head 1 %.3f, mean %.3f\n",
        static_cast<double>(index::computed_pairs(*chosen, 0, 0)) / (kSeqLen * kSeqLen / 2.0),
        static_cast<double>(index::computed_pairs(*chosen, 0, 1)) / (kSeqLen * kSeqLen / 2.0),
        index::density(*chosen));
    for (int source = 0; source < kRanks; ++source) {
      const index::StepBlocks blocks =
          index::step_blocks(*chosen, layout, context.cp_rank(), source);
      std::printf("entries (lambda, delta) against rank %d:", source);
      for (int32_t e = 0; e < blocks.num_entries[kHead]; ++e) {
        const kernels::Entry entry = blocks.entries[kHead * blocks.capacity + e];
        std::printf(" (%d, %d)", entry.lambda, entry.delta);
      }
      std::printf("\n");
    }
    print_state_by_launch(context, *chosen, shards[0], shards[1], shards[2], owner.offset);
    std::printf("the executor's out: %.4f %.4f %.4f ..\n",
                local_out[0][owner.offset][kHead][0].item<double>(),
                local_out[0][owner.offset][kHead][1].item<double>(),
                local_out[0][owner.offset][kHead][2].item<double>());
  }

  // 9 loss and backward; 10 the update
  const train::SummedLoss loss =
      train::chunked_loss(hidden.flatten(0, 1), decoder.head_weight(), batch.labels.flatten());
  at::Tensor sums = at::stack({loss.sum.detach().to(at::kDouble),
                               at::full({}, static_cast<double>(loss.count), at::kDouble)});
  context.index_group()
      .all_reduce({sums.data_ptr(), 16}, comm::ElementType::kFloat64, comm::ReduceOp::kSum)
      ->wait();
  flat.zero_gradient();
  (loss.sum / sums[1].item<double>()).backward();
  flat.collect_gradient();
  optim::all_reduce_buckets(flat.gradient(), context.index_group());
  if (speaks) {
    const train::SummedLoss own = train::chunked_loss(
        hidden.detach()[0].slice(0, owner.offset, owner.offset + 1), decoder.head_weight().detach(),
        batch.labels[0].slice(0, owner.offset, owner.offset + 1));
    std::printf("loss of this token %.4f, of the sequence %.4f over %.0f tokens\n",
                own.sum.item<double>(), sums[0].item<double>() / sums[1].item<double>(),
                sums[1].item<double>());
    std::printf("norm of dq of this token, head 1: %.3e\n",
                local_q.grad()[0][owner.offset][kHead].norm().item<double>());
    std::printf("gradient norm %.4f\n", std::sqrt(optim::sum_of_squares(flat.gradient())));
  }
  const double before = flat.master()[0].item<double>(),
               gradient = flat.gradient()[0].item<double>();
  optim::AdamW adamw({}, flat);
  adamw.step(1e-3);
  if (speaks) {
    std::printf("first weight %.5f, gradient %.2e, after one step %.5f\n", before, gradient,
                flat.master()[0].item<double>());
  }
}

}  // namespace

int main() {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() /
                                       ("mtraining_walkthrough_" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  const std::string prefix = write_tokens(folder);
  comm::run_loopback(kRanks, [&](comm::Transport& transport) { walk(transport, prefix); });
  std::filesystem::remove_all(folder);
  return 0;
}
