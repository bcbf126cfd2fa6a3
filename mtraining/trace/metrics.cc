#include "mtraining/trace/metrics.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "mtraining/base/check.h"

namespace mtraining::trace {
namespace {

nlohmann::ordered_json number(double value) {
  if (!std::isfinite(value)) return nullptr;
  return value;
}
nlohmann::ordered_json number(const std::optional<double>& value) {
  if (!value) return nullptr;
  return number(*value);
}

}  // namespace

std::string to_json(const StepMetrics& m) {
  nlohmann::ordered_json row;
  row["train_step"] = m.train_step;
  row["loss"] = number(m.loss);
  row["valid_loss"] = number(m.valid_loss);
  row["valid_loss_dense"] = number(m.valid_loss_dense);
  row["grad_norm"] = number(m.grad_norm);
  row["lr"] = number(m.lr);
  row["tokens"] = m.tokens;
  row["tokens_total"] = m.tokens_total;
  row["tokens_per_s"] = number(m.tokens_per_s);
  row["tokens_per_s_per_gpu"] = number(m.tokens_per_s_per_gpu);
  row["mfu"] = number(m.mfu);
  row["step_s"] = number(m.step_s);
  row["data_wait_s"] = number(m.data_wait_s);
  row["attention_density"] = number(m.attention_density);
  row["attention_recall"] = number(m.attention_recall);
  row["attention_recall_worst"] = number(m.attention_recall_worst);
  row["worker_imbalance"] = number(m.worker_imbalance);
  row["step_imbalance"] = number(m.step_imbalance);
  row["worker_imbalance_time"] = number(m.worker_imbalance_time);
  row["step_imbalance_time"] = number(m.step_imbalance_time);
  row["comm_bytes"] = m.comm_bytes;
  row["peak_memory_bytes"] = m.peak_memory_bytes;
  row["peak_tensor_bytes"] = m.peak_tensor_bytes;
  row["skipped"] = m.skipped;
  row["heads_dense"] = m.heads_dense;
  row["caps_hit"] = m.caps_hit;
  row["columns_per_step"] = m.columns_per_step;
  return row.dump();
}

MetricsFile::MetricsFile(const std::filesystem::path& path, int64_t keep_to)
    : path_(path.string()) {
  if (keep_to > 0 && std::filesystem::exists(path)) {
    // Beside it first: a process that dies here leaves the rows as they were.
    const std::string part = path_ + ".part";
    std::ifstream rows(path);
    std::ofstream kept(part);
    for (std::string line; std::getline(rows, line);) {
      const nlohmann::json row = nlohmann::json::parse(line, nullptr, false);
      const bool whole =
          row.is_object() && row.contains("train_step") && row["train_step"].is_number_integer();
      if (whole && row["train_step"].get<int64_t>() <= keep_to) kept << line << '\n';
    }
    kept.close();
    MT_CHECK_EXTERNAL(!kept.fail(), part, ": writing failed: ", std::strerror(errno));
    std::filesystem::rename(part, path);
  }
  out_.open(path, keep_to > 0 ? std::ios::app : std::ios::trunc);
  MT_CHECK_EXTERNAL(out_.good(), path_, ": cannot be created: ", std::strerror(errno));
}

void MetricsFile::write(const StepMetrics& metrics) {
  out_ << to_json(metrics) << '\n' << std::flush;
  MT_CHECK_EXTERNAL(out_.good(), path_, ": writing failed: ", std::strerror(errno));
}

}  // namespace mtraining::trace
