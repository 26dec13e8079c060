#include "cc/base/memory_region.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "cc/base/racy_memory.h"

namespace tfswitch {
namespace {

// Few mprotect() calls, and little memory that counts as committed where the
// system does not overcommit.
constexpr size_t kMinUsableStep = 2 * kHugePageBytes;
constexpr size_t kMaxUsableStep = 128 * kHugePageBytes;

// Whether memory that could be used counts as used.
bool OvercommitIsForbidden() {
  std::ifstream file("/proc/sys/vm/overcommit_memory");
  int mode = 0;
  return (file >> mode) && mode == 2;
}

}  // namespace

absl::StatusOr<MemoryReservation> MemoryReservation::Create(size_t bytes,
                                                            size_t min_bytes) {
  const bool is_usable = !OvercommitIsForbidden();
  for (size_t size = RoundUpTo(bytes, kHugePageBytes);;
       size = RoundUpTo(size / 2, kHugePageBytes)) {
    // One huge page more than asked, to align within.
    const size_t map_bytes = size + kHugePageBytes;
    void* const map =
        mmap(nullptr, map_bytes, is_usable ? PROT_READ | PROT_WRITE : PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map != MAP_FAILED) {
      madvise(map, map_bytes, MADV_NOHUGEPAGE);
      MemoryReservation reservation;
      reservation.map_ = map;
      reservation.map_bytes_ = map_bytes;
      char* const begin = static_cast<char*>(map);
      const size_t misalignment =
          reinterpret_cast<uintptr_t>(begin) % kHugePageBytes;
      reservation.data_ =
          begin + (misalignment == 0 ? 0 : kHugePageBytes - misalignment);
      reservation.size_ = size;
      reservation.is_usable_ = is_usable;
      return reservation;
    }
    if (size / 2 < min_bytes) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "cannot reserve ", size, " bytes of address space (",
          std::strerror(errno),
          "); raise the limit of this process (`ulimit -v`) or use fewer "
          "tables"));
    }
  }
}

MemoryReservation::~MemoryReservation() {
  if (map_ != nullptr) munmap(map_, map_bytes_);
}

MemorySpan MemoryReservation::Span(size_t begin, size_t bytes) const {
  return MemorySpan(data_ + begin, bytes, is_usable_ ? bytes : 0);
}

bool MemorySpan::Extend(size_t end) {
  if (end <= usable_) return true;
  if (end > capacity_) return false;
  const size_t step = std::clamp(usable_, kMinUsableStep, kMaxUsableStep);
  const size_t usable = std::min(
      capacity_, RoundUpTo(std::max(end, usable_ + step), kHugePageBytes));
  if (mprotect(data_ + usable_, usable - usable_, PROT_READ | PROT_WRITE) !=
      0) {
    return false;
  }
  usable_ = usable;
  return true;
}

void MemorySpan::Release(size_t begin, size_t end) {
  if (begin < end) madvise(data_ + begin, end - begin, MADV_DONTNEED);
}

void MemorySpan::Reset() {
  if (usable_ == 0) return;
#if TFSWITCH_THREAD_SANITIZER
  // It takes mapping memory for writing to it.
  Release(0, usable_);
#else
  // In one step: an access from another thread waits for it and finds zeros.
  void* const map =
      mmap(data_, usable_, PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (map == MAP_FAILED) Release(0, usable_);
#endif
  madvise(data_, usable_, MADV_NOHUGEPAGE);
}

size_t PhysicalMemoryBytes() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace tfswitch
