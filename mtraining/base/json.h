// JSON text to a value, strictly: a key given twice is an error, and every error is one sentence.
//
// In:   JSON text or a file, and what to call it in messages. Out: nlohmann::json.
// Next: model/hf_config, checkpoint/ (safetensors headers, index files, manifests).
//
// A parser that keeps the last of two equal keys would load one of two tensors of the same name without a word.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace mtraining {

/// `where` begins each message; `offset` is where the text begins in its file and is added to positions in messages.
/// Errors: InvalidArgument: not JSON (with the offset), a key twice in one object (with the key), values nested deeper than
/// max_depth.
nlohmann::json parse_json(std::string_view text, const std::string& where, int64_t offset = 0,
                          int max_depth = 32);

/// The whole file as text. Errors: InvalidArgument naming the path: missing, a folder, larger than max_bytes;
/// ExternalError where reading fails.
std::string read_text_file(const std::filesystem::path& path, int64_t max_bytes = int64_t{1} << 28);

/// Errors: those of read_text_file and parse_json.
nlohmann::json read_json_file(const std::filesystem::path& path);

/// A name from a file, fit for a message of one line: in quotes, control and non-ASCII bytes as \xNN, cut after 120 bytes.
std::string in_quotes(std::string_view name);

}  // namespace mtraining
