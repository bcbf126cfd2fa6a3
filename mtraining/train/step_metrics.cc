#include <algorithm>

#include "mtraining/base/check.h"
#include "mtraining/train/device.h"
#include "mtraining/train/imbalance.h"
#include "mtraining/train/trainer_state.h"

namespace mtraining::train {

double Trainer::State::gather_metrics(const StepUnderWay& step, const AttendRequest& request,
                                      trace::StepMetrics& m) {
  const AttentionSeen seen = layers.seen();
  const std::vector<StepWork>& work = layers.work();
  const auto gathered = job.gather(
      {step.data_wait_s,
       static_cast<double>(context.bytes_sent() + job.bytes_sent() - step.bytes_before),
       static_cast<double>(resolved.device.is_cpu() ? peak_resident_bytes()
                                                    : peak_memory(resolved.device).reserved),
       static_cast<double>(work.size()), seen.mean_density(), static_cast<double>(seen.heads_dense),
       static_cast<double>(seen.caps_hit), stop != nullptr && stop->load() ? 1.0 : 0.0,
       save_is_due() ? 1.0 : 0.0, static_cast<double>(trace::now_us() - step.begin_us) * 1e-6,
       static_cast<double>(seen.columns_per_step), seen.pairs,
       static_cast<double>(memory.peak_bytes()), static_cast<double>(seen.dense_by_torch)});
  bool same_events = true;
  double density = 0, attention_pairs = 0;
  size_t most_events = 0;  // groups hold different samples, and so may exchange columns or not
  for (size_t r = 0; r < gathered.size(); ++r) {
    const auto& g = gathered[r];
    m.data_wait_s = std::max(m.data_wait_s, g[0]);
    m.comm_bytes += static_cast<int64_t>(g[1]);
    m.peak_memory_bytes = std::max(m.peak_memory_bytes, static_cast<int64_t>(g[2]));
    m.peak_tensor_bytes = std::max(m.peak_tensor_bytes, static_cast<int64_t>(g[12]));
    const size_t first_of_group = r - r % static_cast<size_t>(resolved.cp_size);
    same_events = same_events && g[3] == gathered[first_of_group][3];
    most_events = std::max(most_events, static_cast<size_t>(g[3]));
    density += g[4] / static_cast<double>(gathered.size());
    if (r % resolved.cp_size == 0) {  // every rank of a context-parallel group has the same index
      m.heads_dense += static_cast<int64_t>(g[5]);
      m.caps_hit += static_cast<int64_t>(g[6]);
      m.columns_per_step += static_cast<int64_t>(g[10]);
      m.dense_by_torch += static_cast<int64_t>(g[13]);
      attention_pairs += g[11];
    }
    stop_agreed = stop_agreed || g[7] != 0;
    save_agreed = save_agreed || g[8] != 0;
  }
  stop_poll.step_took(gathered[0][9]);
  MT_ASSERT(same_events, "ranks of one group ran different numbers of ring steps");
  m.attention_density = density;
  if (all_dense(request.patterns)) {
    m.attention_recall = 1;
    m.attention_recall_worst = 1;
  } else if (request.measure_recall) {
    m.attention_recall = seen.mean_recall();
    m.attention_recall_worst = seen.recall_worst;
  }
  if (most_events > 0) {
    std::vector<double> flat_work;
    for (const StepWork& w : work) flat_work.insert(flat_work.end(), {w.pairs, w.seconds});
    flat_work.resize(2 * most_events, 0);  // steps without work change no degree
    const auto all_work = job.gather(flat_work);
    const Imbalance pairs = imbalance_of(all_work, resolved.cp_size, 0);
    const Imbalance time = imbalance_of(all_work, resolved.cp_size, 1);
    m.worker_imbalance = pairs.worker;
    m.step_imbalance = pairs.step;
    m.worker_imbalance_time = time.worker;
    m.step_imbalance_time = time.step;
  }
  return attention_pairs;
}

}  // namespace mtraining::train
