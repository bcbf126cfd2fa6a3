// Exchange on a GPU: sums of several ranks' arrays in rank order, and links that are held for a time. For ranks that share a device.
//
// In:   arrays in device memory. Out: their sum or maximum in every destination; a stream that goes on no earlier than it may.
// Next: comm/loopback_device.cc.
//
// Stream: enqueues, never synchronises, allocates nothing. Errors: Unsupported, ExternalError from a launch.
#pragma once

#include <cstdint>
#include <span>

namespace mtraining::kernels::exchange_cuda {

enum class Element : int32_t { kInt64, kInt32, kFloat32, kFloat64, kBFloat16 };
inline constexpr int kMaxArrays = 128;

/// destinations[d][i] = op over r of sources[r][i]: float32 in float32 from the first source on, bf16 in float32 and rounded once,
/// the others in their type; a NaN in any makes it NaN. Destinations may be sources. At most kMaxArrays of each.
void reduce_in_order(Element element, bool max, int64_t count, std::span<const void* const> sources,
                     std::span<void* const> destinations, void* stream);

/// *deadline = *free_at = max(now, *free_at) + ns, in the device's nanoseconds: a link that is taken for `ns` from when it is free.
void take_link(uint64_t* free_at, uint64_t* deadline, int64_t ns, void* stream);
/// The stream goes on when *deadline has passed.
void hold_until(const uint64_t* deadline, void* stream);

}  // namespace mtraining::kernels::exchange_cuda
