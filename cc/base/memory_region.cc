// Create() asks for `bytes`, or for a share of the remaining address space if
// `bytes` exceeds this share. In the second case it first tries the addresses
// beyond 2^47, which do not count as that space. Only some processors have
// them. It halves the request until the system grants it and enough address
// space remains for everything else.
//
// Where the system overcommits memory, the whole reservation is usable at once
// and Extend() does nothing. Reset() maps new memory over the old in one step,
// so that a concurrent reader finds zeros and never an unmapped address.

#include "cc/base/memory_region.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "cc/base/racy_memory.h"

namespace tfswitch {
namespace {

// How many bytes Extend() makes usable at a time. Large steps need few
// mprotect() calls. Small steps waste little on systems that count usable
// memory as memory in use.
constexpr size_t kMinUsableStep = 2 * kHugePageBytes;
constexpr size_t kMaxUsableStep = 128 * kHugePageBytes;

// Whether the system counts memory as in use as soon as it is usable.
bool OvercommitIsForbidden() {
  std::ifstream file("/proc/sys/vm/overcommit_memory");
  int mode = 0;
  return (file >> mode) && mode == 2;
}

// The end of the ordinary address space. Higher addresses exist on some
// processors; mmap() uses them only if its caller asks for a high address.
constexpr size_t kAddressSpace = size_t{1} << 47;

// The number of reserved bytes in it.
std::atomic<size_t> reserved_bytes{0};

bool IsBeyondAddressSpace(const void* map) {
  return reinterpret_cast<uintptr_t>(map) >= kAddressSpace;
}

void* Map(void* hint, size_t bytes, int protection) {
  return mmap(hint, bytes, protection,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

// Maps memory above kAddressSpace, at addresses that only processors with five
// levels of page tables have. Returns MAP_FAILED on others.
void* MapBeyondAddressSpace(size_t bytes, int protection) {
#if TFSWITCH_THREAD_SANITIZER || defined(__SANITIZE_ADDRESS__)
  return MAP_FAILED;  // The sanitizers do not support such addresses.
#else
  void* const map =
      Map(reinterpret_cast<void*>(2 * kAddressSpace), bytes, protection);
  if (map == MAP_FAILED || IsBeyondAddressSpace(map)) return map;
  munmap(map, bytes);
  return MAP_FAILED;
#endif
}

// Address space that stays free for everything else: stacks, messages, files.
constexpr size_t kRoomForOthers = size_t{64} << 30;

// Whether kRoomForOthers bytes of address space are still free. Always true if
// the user has limited the address space of the process.
bool LeavesRoom() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    return true;
  }
  void* const probe = Map(nullptr, kRoomForOthers, PROT_NONE);
  if (probe == MAP_FAILED) return false;
  munmap(probe, kRoomForOthers);
  return true;
}

// The memory of this process's control group.
struct MemoryOfGroup {
  size_t limit = std::numeric_limits<size_t>::max();
  size_t used = 0;
};

MemoryOfGroup GroupMemory() {
  constexpr const char* kFiles[][2] = {
      {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
      {"/sys/fs/cgroup/memory/memory.limit_in_bytes",
       "/sys/fs/cgroup/memory/memory.usage_in_bytes"}};
  MemoryOfGroup group;
  for (const auto& [limit_file, used_file] : kFiles) {
    size_t limit = 0;
    // Not a number but "max" if there is no limit.
    if (std::ifstream(limit_file) >> limit && limit > 0) {
      group.limit = limit;
      std::ifstream(used_file) >> group.used;
    }
  }
  return group;
}

}  // namespace

absl::StatusOr<MemoryReservation> MemoryReservation::Create(size_t bytes,
                                                            size_t min_bytes) {
  const bool is_usable = !OvercommitIsForbidden();
  const int protection = is_usable ? PROT_READ | PROT_WRITE : PROT_NONE;
  const size_t wish = RoundUpTo(bytes, kHugePageBytes);
  const size_t left =
      kAddressSpace - std::min(kAddressSpace, reserved_bytes.load());
  // Each try reserves a huge page more, so that the beginning can be aligned.
  size_t size = std::min(
      wish, RoundUpTo(std::max(left / kShare, min_bytes), kHugePageBytes));
  void* map = size < wish
                  ? MapBeyondAddressSpace(wish + kHugePageBytes, protection)
                  : MAP_FAILED;
  if (map != MAP_FAILED) size = wish;
  while (map == MAP_FAILED) {
    map = Map(nullptr, size + kHugePageBytes, protection);
    if (map != MAP_FAILED && LeavesRoom()) break;
    if (map != MAP_FAILED) {
      munmap(map, size + kHugePageBytes);
      map = MAP_FAILED;
      errno = ENOMEM;
    }
    if (size / 2 < min_bytes) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "cannot reserve ", size, " bytes of address space (",
          std::strerror(errno),
          "); raise the limit of this process (`ulimit -v`) or use fewer "
          "tables"));
    }
    size = RoundUpTo(size / 2, kHugePageBytes);
  }
  MemoryReservation reservation;
  reservation.map_ = map;
  reservation.map_bytes_ = size + kHugePageBytes;
  if (!IsBeyondAddressSpace(map)) reserved_bytes += reservation.map_bytes_;
  madvise(map, reservation.map_bytes_, MADV_NOHUGEPAGE);
  const auto begin = reinterpret_cast<uintptr_t>(map);
  reservation.data_ =
      static_cast<char*>(map) + (RoundUpTo(begin, kHugePageBytes) - begin);
  reservation.size_ = size;
  reservation.is_usable_ = is_usable;
  return reservation;
}

MemoryReservation::~MemoryReservation() {
  if (map_ == nullptr) return;
  munmap(map_, map_bytes_);
  if (!IsBeyondAddressSpace(map_)) reserved_bytes -= map_bytes_;
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
  // ThreadSanitizer would take a mapping over this memory for a write to it, so
  // Release() is called instead.
  Release(0, usable_);
#else
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

size_t MemoryLimitBytes() {
  return std::min(PhysicalMemoryBytes(), GroupMemory().limit);
}
size_t AvailableMemoryBytes() {
  size_t available = PhysicalMemoryBytes() / 2;
  std::ifstream info("/proc/meminfo");
  std::string name;
  for (size_t kib = 0; info >> name >> kib; info.ignore(80, '\n')) {
    if (name == "MemAvailable:") {
      available = kib << 10;
      break;
    }
  }
  const MemoryOfGroup group = GroupMemory();
  return std::min(available, group.limit - std::min(group.used, group.limit));
}

}  // namespace tfswitch
