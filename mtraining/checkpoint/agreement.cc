#include "mtraining/checkpoint/agreement.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace mtraining::checkpoint {

std::string agree_alone(const std::string& error) { return error; }

Agreement agree_over(comm::Communicator& communicator) {
  return [&communicator](const std::string& error) -> std::string {
    constexpr size_t kBytes = 1024, kText = 1000;
    std::vector<char> mine(kBytes, '\0');
    const std::string text = error.empty() ? "" : error.substr(0, kText);
    std::copy(text.begin(), text.end(), mine.begin());
    std::vector<char> all(kBytes * static_cast<size_t>(communicator.size()));
    std::vector<comm::Buffer> parts;
    for (int rank = 0; rank < communicator.size(); ++rank)
      parts.push_back({all.data() + kBytes * static_cast<size_t>(rank), kBytes});
    communicator.all_gather({mine.data(), kBytes}, parts)->wait();
    for (const comm::Buffer& part : parts) {
      const char* other = static_cast<const char*>(part.data);
      if (*other != '\0') return {other, strnlen(other, kBytes)};
    }
    return "";
  };
}

}  // namespace mtraining::checkpoint
