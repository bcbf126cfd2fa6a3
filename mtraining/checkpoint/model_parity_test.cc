// A program that Python tests drive to hold our decoder beside that of transformers: it is no gtest binary.
//
//   logits FOLDER IN.safetensors OUT.safetensors   ids [B, n], positions [n] int64 -> logits [B, n, vocab] float32, dense attention
//   save FOLDER OUT LENGTH                         loads a model folder and saves it for the trained length
//   init CONFIG OUT SEED                           saves a model that starts from nothing but a config.json and a seed
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <exception>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "mtraining/base/check.h"
#include "mtraining/checkpoint/safetensors.h"
#include "mtraining/checkpoint/weight_folder.h"
#include "mtraining/checkpoint/weights.h"
#include "mtraining/model/decoder.h"
#include "mtraining/model/hf_config.h"

namespace mtraining::checkpoint {
namespace {

at::Tensor causal_attention(int64_t, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v) {
  return at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                          {}, 0.0, true, std::nullopt, true)
      .transpose(1, 2);
}

model::Decoder load(const std::string& folder) {
  const model::HfConfig hf = model::read_hf_config(folder);
  const model::DecoderConfig config = model::decoder_config(hf);
  model::DecoderParameters parameters = model::init_parameters(config, 1);
  load_weights(WeightFolder(folder), parameters.list(), config.tie_word_embeddings);
  return {config, parameters};
}

at::Tensor read_int64(const SafetensorsFile& file, const std::string& name) {
  at::Tensor tensor = at::empty(file.find(name)->spec.shape, at::kLong);
  const auto bytes = file.data(name);
  MT_CHECK_ARG(bytes.size() == tensor.nbytes(), name, ": expected int64");
  std::copy(bytes.begin(), bytes.end(), static_cast<std::byte*>(tensor.data_ptr()));
  return tensor;
}

void logits(const std::string& folder, const std::string& in, const std::string& out) {
  const at::NoGradGuard no_grad;
  const model::Decoder decoder = load(folder);
  const SafetensorsFile file(in);
  const at::Tensor hidden =
      decoder.forward(read_int64(file, "ids"), read_int64(file, "positions"), causal_attention);
  const at::Tensor result = at::linear(hidden, decoder.head_weight()).contiguous();
  SafetensorsWriter writer(out, {{"logits", StoredType::kF32, result.sizes().vec()}}, {});
  writer.write("logits", {static_cast<const std::byte*>(result.const_data_ptr()), result.nbytes()});
  writer.finish();
}

int run(const std::vector<std::string>& arguments) {
  const auto is = [&](const char* verb, size_t count) {
    return arguments.size() == count + 1 && arguments[0] == verb;
  };
  if (is("logits", 3)) {
    logits(arguments[1], arguments[2], arguments[3]);
  } else if (is("save", 3)) {
    save_model_folder(arguments[2], model::read_hf_config(arguments[1]), std::stoll(arguments[3]),
                      load(arguments[1]).parameters().list(), at::kFloat,
                      checkpoint::read_companion_files(arguments[1]));
  } else if (is("init", 3)) {
    const model::HfConfig read = model::read_hf_config(arguments[1]);
    const model::DecoderConfig config = model::decoder_config(read);
    const int64_t length = read.max_position_embeddings;
    save_model_folder(arguments[2], model::hf_config(config, length), length,
                      model::init_parameters(config, std::stoull(arguments[3])).list(), at::kFloat,
                      {});
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
