// Digest: 16 hexadecimal digits that stand for a text, to say whether two are the same.
//
// In:   bytes. Out: their xxh3 as text. Next: results.h, cli/eval_tasks.cc.
#pragma once

#include <string>
#include <string_view>

namespace mtraining::eval {

std::string digest_of(std::string_view bytes);

}  // namespace mtraining::eval
