#include "mtraining/checkpoint/weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <string_view>

#include "mtraining/base/check.h"
#include "mtraining/base/json.h"
#include "mtraining/checkpoint/disk.h"

namespace mtraining::checkpoint {
namespace {

constexpr std::string_view kHead = "lm_head.weight";
constexpr std::string_view kEmbedding = "model.embed_tokens.weight";

struct TypePair {
  StoredType stored;
  at::ScalarType scalar;
};
constexpr TypePair kTypes[] = {{StoredType::kF64, at::kDouble},    {StoredType::kF32, at::kFloat},
                               {StoredType::kBF16, at::kBFloat16}, {StoredType::kF16, at::kHalf},
                               {StoredType::kI64, at::kLong},      {StoredType::kI32, at::kInt},
                               {StoredType::kU8, at::kByte},       {StoredType::kBool, at::kBool}};

/// Faults of one kind, of which the first few are shown.
class Faults {
 public:
  explicit Faults(const char* what) : what_(what) {}
  void add(const std::string& text) {
    constexpr int kShown = 5;
    if (count_++ < kShown) text_ += (count_ > 1 ? ", " : "") + text;
  }
  /// "; 7 missing: a, b, c, d, e, .."
  std::string report() const {
    if (count_ == 0) return "";
    return concat("; ", count_, ' ', what_, ": ", text_, count_ > 5 ? ", .." : "");
  }

 private:
  const char* what_;
  std::string text_;
  int count_ = 0;
};

bool follows_from_configuration(std::string_view name) {
  return name.ends_with("rotary_emb.inv_freq");
}

void check_names_and_shapes(const WeightFolder& folder,
                            const std::map<std::string, at::Tensor, std::less<>>& wanted,
                            bool tied_head) {
  Faults missing("parameters missing"), unused("tensors unused"), shapes("shapes differ"),
      types("types that are no floats");
  for (const auto& [name, value] : wanted) {
    const TensorSpec* spec = folder.find(name);
    if (!spec) {
      missing.add(in_quotes(name));
      continue;
    }
    if (!at::isFloatingType(scalar_type_of(spec->type)))
      types.add(concat(in_quotes(name), ' ', to_string(*spec)));
    if (spec->shape != value.sizes().vec())
      shapes.add(concat(in_quotes(name), " expected ", value.sizes(), ", got ", to_string(*spec)));
  }
  for (const std::string& name : folder.names())
    if (!wanted.contains(name) && !follows_from_configuration(name) &&
        !(tied_head && name == kHead))
      unused.add(in_quotes(name));
  const std::string faults = missing.report() + unused.report() + shapes.report() + types.report();
  MT_CHECK_ARG(faults.empty(), folder.path(), ": its tensors do not fit the model", faults);
}

}  // namespace

StoredType stored_type_of(at::ScalarType type) {
  for (const TypePair& pair : kTypes)
    if (pair.scalar == type) return pair.stored;
  throw Unsupported(concat("tensors of type ", at::toString(type), " cannot be stored"));
}

at::ScalarType scalar_type_of(StoredType type) {
  for (const TypePair& pair : kTypes)
    if (pair.stored == type) return pair.scalar;
  throw InternalError("no such StoredType");
}

void check_weights(const WeightFolder& folder, const std::vector<model::Parameter>& parameters,
                   bool tied_head) {
  std::map<std::string, at::Tensor, std::less<>> wanted;
  for (const model::Parameter& parameter : parameters) {
    MT_CHECK_ARG(wanted.emplace(parameter.name, parameter.value).second, "parameter ",
                 in_quotes(parameter.name), " is given twice");
    MT_CHECK_ARG(parameter.value.is_floating_point(), "parameter ", in_quotes(parameter.name),
                 ": expected floats, got ", at::toString(parameter.value.scalar_type()));
  }
  check_names_and_shapes(folder, wanted, tied_head);
  if (tied_head && !wanted.contains(kHead) && folder.find(kHead)) {
    const TensorSpec* embedding = folder.find(kEmbedding);
    const auto head_bytes = folder.data(kHead);
    MT_CHECK_ARG(embedding && embedding->type == folder.find(kHead)->type &&
                     std::ranges::equal(head_bytes, folder.data(kEmbedding)),
                 folder.path(), ": tie_word_embeddings is true, but ", in_quotes(kHead),
                 " differs from ", in_quotes(kEmbedding));
  }
}

void load_weights(const WeightFolder& folder, const std::vector<model::Parameter>& parameters,
                  bool tied_head) {
  check_weights(folder, parameters, tied_head);
  for (const auto& [name, value] : parameters) {
    value.detach().copy_(mapped_weight(folder, name));
    folder.release(name);
  }
}

at::Tensor mapped_weight(const WeightFolder& folder, const std::string& name) {
  const std::span<const std::byte> bytes = folder.data(name);
  const TensorSpec& spec = *folder.find(name);
  const at::TensorOptions options(scalar_type_of(spec.type));
  const bool aligned = reinterpret_cast<uintptr_t>(bytes.data()) % bytes_of(spec.type) == 0;
  if (aligned && !bytes.empty())
    return at::from_blob(const_cast<std::byte*>(bytes.data()), spec.shape, options);
  at::Tensor tensor = at::empty(spec.shape, options);
  if (!bytes.empty()) std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

void save_weights(const std::filesystem::path& folder,
                  const std::vector<model::Parameter>& parameters, at::ScalarType type,
                  int64_t max_shard_bytes) {
  std::vector<TensorSpec> specs;
  for (const model::Parameter& parameter : parameters)
    specs.push_back({parameter.name, stored_type_of(type), parameter.value.sizes().vec()});
  WeightFolderWriter writer(folder, specs, max_shard_bytes);
  for (const model::Parameter& parameter : parameters) {
    const at::Tensor host = parameter.value.detach().to(at::kCPU, type).contiguous();
    writer.write(parameter.name, {static_cast<const std::byte*>(host.data_ptr()),
                                  static_cast<size_t>(host.nbytes())});
  }
  writer.finish();
}

void save_model_folder(const std::filesystem::path& folder, const model::HfConfig& config,
                       int64_t trained_length, const std::vector<model::Parameter>& parameters,
                       at::ScalarType type, const CompanionFiles& companions) {
  model::HfConfig saved = config;
  saved.dtype = type == at::kFloat ? "float32" : type == at::kBFloat16 ? "bfloat16" : "float16";
  MT_CHECK_SUPPORTED(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf,
                     "weights: expected float32, bfloat16 or float16, got ", at::toString(type));
  write_text_file(folder / "config.json", model::to_json(saved, trained_length));
  write_companion_files(companions, folder);
  save_weights(folder, parameters, type);
}

}  // namespace mtraining::checkpoint
