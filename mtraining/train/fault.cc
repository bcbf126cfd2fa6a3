#include "mtraining/train/fault.h"

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>

#include "mtraining/base/check.h"

namespace mtraining::train {

Fault Fault::from_environment(int rank) {
  Fault fault;
  const char* text = std::getenv("MTRAINING_FAULT");
  if (text == nullptr || *text == '\0') return fault;
  int64_t wanted = -1;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t equals = part.find('=');
    const std::string key = part.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : part.substr(equals + 1);
    if (key == "rank") {
      wanted = std::atoll(value.c_str());
    } else if (key == "step") {
      fault.step_ = std::atoll(value.c_str());
    } else if (key == "skip") {
      fault.skip_ = std::atoll(value.c_str());
    } else if (key == "at") {
      fault.place_ = value;
    } else if (key == "kind") {
      fault.kind_ = value;
    } else {
      throw InvalidArgument(
          concat("MTRAINING_FAULT: expected rank, step, skip, at or kind, got \"", key, "\""));
    }
  }
  fault.rank_ = rank;
  fault.armed_ = wanted == rank;
  return fault;
}

bool Fault::is_at(std::string_view place, int64_t train_step) const {
  return armed_ && place == place_ && (train_step == step_ || step_ == 0);
}

void Fault::strike(std::string_view place, int64_t train_step) const {
  if (!is_at(place, train_step) || skip_-- > 0) return;
  if (kind_ == "kill") ::raise(SIGKILL);
  if (kind_ == "exit") ::_exit(3);
  if (kind_ == "stop") ::raise(SIGTERM);
  if (kind_ == "hang") {
    for (;;) ::pause();
  }
  if (kind_ == "throw") {
    throw ExternalError(
        concat("rank ", rank_, ": fault injected in ", place, " of train_step ", train_step));
  }
}

bool Fault::poisons(std::string_view place, int64_t train_step) const {
  return kind_ == "nan" && is_at(place, train_step);
}

}  // namespace mtraining::train
