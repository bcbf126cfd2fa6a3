// AllocationCounter: how many bytes a test binary asks operator new for.
//
// In:   nothing. Out: allocated_bytes, which only grows. Next: tests that hold memory to a bound.
//
// Replaces operator new and delete for the whole binary: included by exactly one source file of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace mtraining::testing {

inline std::atomic<int64_t> allocated_bytes{0};

inline void* counted(std::size_t bytes) {
  allocated_bytes += static_cast<int64_t>(bytes);
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}

}  // namespace mtraining::testing

void* operator new(std::size_t bytes) { return mtraining::testing::counted(bytes); }
void* operator new[](std::size_t bytes) { return mtraining::testing::counted(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
