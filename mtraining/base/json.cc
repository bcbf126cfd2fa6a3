#include "mtraining/base/json.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "mtraining/base/check.h"

namespace mtraining {

std::string in_quotes(std::string_view name) {
  constexpr size_t kLimit = 120;
  constexpr char kHex[] = "0123456789abcdef";
  std::string result = "\"";
  for (const char c : name.substr(0, kLimit)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f && c != '"') {
      result += c;
    } else {
      result += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  if (name.size() > kLimit) result += "...";
  return result + "\"";
}

nlohmann::json parse_json(std::string_view text, const std::string& where, int64_t offset,
                          int max_depth) {
  using nlohmann::json;
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    MT_CHECK_ARG(depth <= max_depth, where, ": expected JSON nested at most ", max_depth,
                 " deep, got deeper");
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      MT_CHECK_ARG(keys.back().insert(key).second, where, ": duplicate name ", in_quotes(key),
                   " in one JSON object: expected each name once");
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), check);
  } catch (const json::parse_error& error) {
    throw InvalidArgument(
        concat(where, ": not valid JSON at offset ", offset + static_cast<int64_t>(error.byte)));
  } catch (const json::exception&) {
    throw InvalidArgument(concat(where, ": not valid JSON: a number does not fit"));
  }
}

std::string read_text_file(const std::filesystem::path& path, int64_t max_bytes) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  MT_CHECK_ARG(file >= 0, path.string(), ": cannot be opened: ", std::strerror(errno));
  struct Closer {
    int file;
    ~Closer() { ::close(file); }
  } closer{file};
  struct stat status {};
  MT_CHECK_EXTERNAL(::fstat(file, &status) == 0, path.string(), ": ", std::strerror(errno));
  MT_CHECK_ARG(S_ISREG(status.st_mode), path.string(), ": expected a file, got something else");
  MT_CHECK_ARG(status.st_size <= max_bytes, path.string(), ": expected at most ", max_bytes,
               " bytes of text, got ", status.st_size);
  std::string text(static_cast<size_t>(status.st_size), '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t got = ::read(file, text.data() + done, text.size() - done);
    if (got < 0 && errno == EINTR) continue;
    MT_CHECK_EXTERNAL(got > 0, path.string(), ": reading failed at offset ", done, ": ",
                      got < 0 ? std::strerror(errno) : "the file became shorter");
    done += static_cast<size_t>(got);
  }
  return text;
}

nlohmann::json read_json_file(const std::filesystem::path& path) {
  return parse_json(read_text_file(path), path.string());
}

}  // namespace mtraining
