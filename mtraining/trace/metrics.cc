#include "mtraining/trace/metrics.h"

#include <sys/stat.h>

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

/// Device and number of the file that a name stands for.
std::pair<dev_t, ino_t> identity(const std::string& path) {
  struct stat status = {};
  return ::stat(path.c_str(), &status) == 0 ? std::pair(status.st_dev, status.st_ino)
                                            : std::pair(dev_t{0}, ino_t{0});
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
  row["dense_by_torch"] = m.dense_by_torch;
  return row.dump();
}

MetricsFile::MetricsFile(const std::filesystem::path& path, int64_t keep_to)
    : path_(path.string()) {
  std::error_code error;
  const std::filesystem::file_type type = std::filesystem::status(path, error).type();
  const bool there = type != std::filesystem::file_type::not_found;
  // Opening a pipe would wait for a reader.
  MT_CHECK_EXTERNAL(!there || type == std::filesystem::file_type::regular, path_,
                    ": expected a file, ",
                    error ? error.message() : std::string("got something else"));
  if (keep_to > 0 && there) {
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
  identity_ = identity(path_);
}

void MetricsFile::write(const StepMetrics& metrics) {
  out_ << to_json(metrics) << '\n' << std::flush;
  MT_CHECK_EXTERNAL(out_.good(), path_, ": writing failed: ", std::strerror(errno));
  // The lock went with a folder that was removed: another run may be in one of the same name.
  MT_CHECK_EXTERNAL(identity(path_) == identity_, path_,
                    ": was removed or replaced while the run went on");
}

}  // namespace mtraining::trace
