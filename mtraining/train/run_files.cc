#include "mtraining/train/run_files.h"

#include <ATen/ATen.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "mtraining/base/check.h"

namespace mtraining::train {
namespace {

void write_json(const std::filesystem::path& path, const nlohmann::ordered_json& json) {
  std::ofstream out(path);
  out << json.dump(2) << '\n';
  out.close();
  MT_CHECK_EXTERNAL(!out.fail(), path.string(), ": writing failed: ", std::strerror(errno));
}

/// numpy's format 1.0: magic, version, header length, a dict padded so that the data begins at a multiple of 64.
void write_npy(const std::filesystem::path& path, const at::Tensor& values) {
  const at::Tensor data = values.to(at::kFloat).contiguous();
  std::string shape;
  for (const int64_t size : data.sizes()) shape += concat(size, ", ");
  std::string header = concat("{'descr': '<f4', 'fortran_order': False, 'shape': (", shape, "), }");
  header.resize((10 + header.size() + 1 + 63) / 64 * 64 - 11, ' ');
  header += '\n';
  std::ofstream out(path, std::ios::binary);
  out.write("\x93NUMPY\x01\x00", 8);
  const auto length = static_cast<uint16_t>(header.size());
  out.write(reinterpret_cast<const char*>(&length), 2);
  out << header;
  out.write(reinterpret_cast<const char*>(data.data_ptr<float>()),
            static_cast<std::streamsize>(data.nbytes()));
  out.close();
  MT_CHECK_EXTERNAL(!out.fail(), path.string(), ": writing failed: ", std::strerror(errno));
}

}  // namespace

void write_summary(const std::filesystem::path& path, const TrainResult& result,
                   const RunConfig& config, const ResolvedRun& resolved) {
  nlohmann::ordered_json json;
  json["steps_done"] = result.steps_done;
  json["stopped"] = result.stopped;
  json["cp_size"] = resolved.cp_size;
  json["dp_size"] = resolved.dp_size;
  json["nodes"] = resolved.topology.nodes;
  json["ranks_per_node"] = resolved.topology.ranks_per_node;
  json["seq_len"] = config.train.seq_len;
  json["data"] = nlohmann::ordered_json::array();
  for (const data::PassCount& count : result.data) {
    json["data"].push_back({{"path", count.path},
                            {"tokens", count.tokens},
                            {"in_samples", count.in_samples},
                            {"labels", count.labels},
                            {"dropped", count.dropped}});
  }
  json["evaluations"] = nlohmann::ordered_json::array();
  for (const Evaluation& e : result.evaluations) {
    nlohmann::ordered_json row = {{"pattern", e.pattern},
                                  {"p", e.p},
                                  {"loss", e.loss},
                                  {"tokens", e.tokens},
                                  {"density_by_layer", e.density_by_layer}};
    if (!e.recall_by_layer.empty()) {
      row["recall_by_layer"] = e.recall_by_layer;
      row["recall_worst"] = e.recall_worst;
    }
    json["evaluations"].push_back(std::move(row));
  }
  write_json(path, json);
}

void write_example(const std::filesystem::path& folder, const at::Tensor& q, const at::Tensor& k,
                   const index::Index& index, int64_t layer, int64_t head, double softmax_scale) {
  std::filesystem::create_directories(folder);
  write_npy(folder / "q.npy", q);
  write_npy(folder / "k.npy", k);
  const auto diagonals = index.diagonals.row(index.row(0, static_cast<int>(head)));
  const auto columns = index.columns.row(index.row(0, static_cast<int>(head)));
  write_json(folder / "index.json",
             {{"layer", layer},
              {"head", head},
              {"block", 64},
              {"seq_len", index.seq_len},
              {"softmax_scale", softmax_scale},
              {"diagonals", std::vector<int32_t>(diagonals.begin(), diagonals.end())},
              {"columns", std::vector<int32_t>(columns.begin(), columns.end())}});
}

}  // namespace mtraining::train
