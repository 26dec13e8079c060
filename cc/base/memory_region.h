// Arrays that grow in place: address space is reserved first, and memory is
// used only when it is touched.
//
//   |<------------------------- reserved ------------------------->|
//   |<------- usable ------->|  no access; costs address space only |
//
// The whole reservation is usable, unless the system counts usable memory as
// memory in use (vm.overcommit_memory=2).
//
//   |<- touched ->|
//
// Nothing in a region ever moves, so a pointer into it can be read as long as
// the region lives. After Release() has given the memory back, a read finds
// zeros.

#ifndef TFSWITCH_CC_BASE_MEMORY_REGION_H_
#define TFSWITCH_CC_BASE_MEMORY_REGION_H_

#include <cstddef>
#include <utility>

#include "absl/status/statusor.h"

namespace tfswitch {

inline constexpr size_t kSmallPageBytes = 4096;
inline constexpr size_t kHugePageBytes = size_t{2} << 20;

inline constexpr size_t RoundUpTo(size_t bytes, size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}
inline constexpr size_t RoundDownTo(size_t bytes, size_t multiple) {
  return bytes / multiple * multiple;
}

// A part of a reservation, which is filled from its beginning. Does not own the
// memory.
//
// Thread-compatible: only one thread at a time may call the functions, but any
// thread may access the usable memory.
class MemorySpan {
 public:
  MemorySpan() = default;
  // REQUIRES: `data` and `capacity` are multiples of kHugePageBytes.
  MemorySpan(char* data, size_t capacity, size_t usable)
      : data_(data), capacity_(capacity), usable_(usable) {}

  char* data() const { return data_; }
  size_t capacity() const { return capacity_; }

  // Makes [0, end) usable. False if `end` exceeds the capacity or the system
  // refuses.
  bool Extend(size_t end);

  // Gives the memory of [begin, end) back to the system; then the range reads
  // as zeros. Both are multiples of kSmallPageBytes.
  void Release(size_t begin, size_t end);

  // Gives all memory back, like Release(), and its page tables as well. Memory
  // that has had small pages can get huge ones only after this.
  void Reset();

 private:
  char* data_ = nullptr;
  size_t capacity_ = 0;
  size_t usable_ = 0;
};

// Owns a reservation, aligned to kHugePageBytes, and unmaps it at destruction.
// The memory gets small pages whatever the system's default is, so that a table
// with few rows takes little memory. The PageKeeper makes huge pages where they
// are useful.
//
// Thread-compatible. Create() and the destructor may be called on any thread.
class MemoryReservation {
 public:
  static constexpr size_t kShare = 64;

  // Reserves `bytes`, but at most a kShare-th of the address space that this
  // process has left, so that later reservations and everything else find room.
  // If the system refuses, or less than 64 GiB would remain for everything
  // else, tries half of the size, and so on, down to `min_bytes`.
  // ResourceExhausted if even that is refused.
  static absl::StatusOr<MemoryReservation> Create(size_t bytes,
                                                  size_t min_bytes);

  MemoryReservation() = default;
  MemoryReservation(MemoryReservation&& other) noexcept {
    *this = std::move(other);
  }
  MemoryReservation& operator=(MemoryReservation&& other) noexcept {
    std::swap(map_, other.map_);
    std::swap(map_bytes_, other.map_bytes_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(is_usable_, other.is_usable_);
    return *this;
  }
  ~MemoryReservation();

  char* data() const { return data_; }
  size_t size() const { return size_; }

  // Part [begin, begin + bytes) of the reservation.
  //
  // REQUIRES: both are multiples of kHugePageBytes.
  MemorySpan Span(size_t begin, size_t bytes) const;

 private:
  void* map_ = nullptr;
  size_t map_bytes_ = 0;
  char* data_ = nullptr;
  size_t size_ = 0;
  bool is_usable_ = false;
};

// Bytes of physical memory of this machine.
size_t PhysicalMemoryBytes();
// The same, or the limit of this process's control group if that is lower.
size_t MemoryLimitBytes();
// How many of these bytes are free. Memory that can be freed by dropping cached
// files counts as free.
size_t AvailableMemoryBytes();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_MEMORY_REGION_H_
