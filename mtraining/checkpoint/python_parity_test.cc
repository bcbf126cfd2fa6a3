// A program that Python tests drive to hold our files and numbers beside those of the Python packages: it is no gtest binary.
//
//   copy IN.safetensors OUT.safetensors      reads all tensors and writes them again, with their metadata
//   copy_folder IN OUT MAX_SHARD_BYTES       the same for a folder of weights
//   describe IN.safetensors                  one JSON object: name -> [dtype, shape]
//   config IN OUT LENGTH                     reads a config.json, writes one for the trained length
//   rope CONFIG                              attention factor, then the inverse frequencies, one a line, exact
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/checkpoint/disk.h"
#include "mtraining/checkpoint/safetensors.h"
#include "mtraining/checkpoint/weight_folder.h"
#include "mtraining/model/hf_config.h"
#include "mtraining/model/rope_scaling.h"

namespace mtraining::checkpoint {
namespace {

void copy(const std::string& from, const std::string& to) {
  const SafetensorsFile file(from);
  std::vector<TensorSpec> specs;
  for (const StoredTensor& tensor : file.tensors()) specs.push_back(tensor.spec);
  SafetensorsWriter writer(to, specs, file.metadata());
  for (const TensorSpec& spec : specs) writer.write(spec.name, file.data(spec.name));
  writer.finish();
}

void copy_folder(const std::string& from, const std::string& to, int64_t max_shard_bytes) {
  const WeightFolder folder(from);
  std::vector<TensorSpec> specs;
  for (const std::string& name : folder.names()) specs.push_back(*folder.find(name));
  WeightFolderWriter writer(to, specs, max_shard_bytes);
  for (const TensorSpec& spec : specs) writer.write(spec.name, folder.data(spec.name));
  writer.finish();
}

void describe(const std::string& path) {
  nlohmann::json root = nlohmann::json::object();
  const SafetensorsFile file(path);
  for (const StoredTensor& tensor : file.tensors())
    root[tensor.spec.name] = {to_string(tensor.spec.type), tensor.spec.shape};
  std::cout << root.dump() << "\n";
}

void rope(const std::string& path) {
  const model::HfConfig config = model::read_hf_config(path);
  const model::RopeFrequencies got = model::rope_frequencies(config.rope, config.head_dim);
  std::printf("%a\n", got.attention_factor);
  for (const float value : got.inverse) std::printf("%a\n", static_cast<double>(value));
}

int run(const std::vector<std::string>& arguments) {
  const auto is = [&](const char* verb, size_t count) {
    return arguments.size() == count + 1 && arguments[0] == verb;
  };
  if (is("copy", 2)) {
    copy(arguments[1], arguments[2]);
  } else if (is("copy_folder", 3)) {
    copy_folder(arguments[1], arguments[2], std::stoll(arguments[3]));
  } else if (is("describe", 1)) {
    describe(arguments[1]);
  } else if (is("config", 3)) {
    const model::HfConfig config = model::read_hf_config(arguments[1]);
    write_text_file(arguments[2], model::to_json(config, std::stoll(arguments[3])));
  } else if (is("rope", 1)) {
    rope(arguments[1]);
  } else {
    throw InvalidArgument("unknown verb");
  }
  return 0;
}

}  // namespace
}  // namespace mtraining::checkpoint

int main(int argc, char** argv) {
  try {
    return mtraining::checkpoint::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
