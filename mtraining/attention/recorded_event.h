// RecordedEvent: a point of a device's current stream, with its time.
//
// In:   a device. Out: an event that was recorded now. Next: ring_context.cc, train/part_times.cc, which read the time between two.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace mtraining::attention {

/// Stream: the current one; does not synchronise.
inline c10::Event recorded(at::Device device) {
  c10::Event event(device.type(), c10::EventFlag::BACKEND_DEFAULT);  // with a time
  event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

}  // namespace mtraining::attention
