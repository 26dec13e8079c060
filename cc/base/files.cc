// WriteFileAtomically() flushes the file before the rename and the folder after
// it, so that a crash at any moment leaves the old file or the new one.
// FolderLock::Take() tries to lock at short intervals, because flock() without
// LOCK_NB could neither be interrupted nor end at a deadline.
//
// ResolveBelow() refuses every "..", then resolves symbolic links, and then
// looks for symbolic links in the folder and its subfolders. It includes
// subfolders because a checkpoint has files in them.

#include "cc/base/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/memory/memory.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "cc/base/copy_bytes.h"
#include "cc/base/log_writer.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {
namespace {

namespace fs = std::filesystem;

// The path of the folder that contains `path`, with a slash at the end; "." if
// `path` has no slash.
std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

FileStamp StampIn(const struct stat& info) {
  FileStamp stamp;
  stamp.device = info.st_dev;
  stamp.inode = info.st_ino;
  stamp.size = info.st_size;
  stamp.changed_ns =
      int64_t{info.st_ctim.tv_sec} * 1'000'000'000 + info.st_ctim.tv_nsec;
  return stamp;
}

}  // namespace

absl::Status ErrnoStatus(absl::string_view what, const std::string& path,
                         int error) {
  const std::string message =
      absl::StrCat("cannot ", what, " '", path, "': ", strerror(error));
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
      return absl::ResourceExhaustedError(message);
    case ENOENT:
      return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(message);
    case ENOTDIR:
      return absl::FailedPreconditionError(message);
    default:
      return absl::InternalError(message);
  }
}

std::string FileNameOf(absl::string_view text) {
  std::string name;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0 || c == '_' || c == '-' ||
        (c == '.' && !name.empty())) {
      name += c;
    } else {
      name += absl::StrFormat("%%%02X", byte);
    }
  }
  return name;
}

absl::Status CheckId(absl::string_view what, absl::string_view id) {
  const bool is_good = !id.empty() && id.size() <= 64 &&
                       std::all_of(id.begin(), id.end(), [](unsigned char c) {
                         return std::isalnum(c) != 0 || c == '-' || c == '_';
                       });
  if (is_good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      what, ": expected 1 to 64 letters, digits, '-' and '_', got '",
      absl::CHexEscape(id.substr(0, 80)), "'"));
}

std::string DefaultRoot() {
  std::error_code error;
  const fs::path current = fs::current_path(error);
  return error || current == "/" ? "" : current.string();
}

std::string AbsolutePath(const std::string& path) {
  std::error_code error;
  const fs::path absolute = fs::absolute(path, error);
  return error ? path : absolute.string();
}

absl::StatusOr<std::string> ResolveBelow(const std::string& root,
                                         const std::string& path) {
  if (path.empty() || path.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("a path without NUL is needed. Received: '",
                     absl::CHexEscape(path), "'"));
  }
  const auto outside = [&](absl::string_view why) {
    return absl::PermissionDeniedError(
        absl::StrCat("path '", path, "' is not below '", root,
                     "', the folder whose files clients may name", why));
  };
  std::error_code error;
  const fs::path base = fs::canonical(root, error);
  if (error) return ErrnoStatus("find folder", root, error.value());
  const fs::path asked = base / path;  // `path` alone, if it is absolute.
  for (const fs::path& part : asked) {
    if (part == "..") return outside(": it has a '..'");
  }
  fs::path found = fs::weakly_canonical(asked, error);
  if (error) return ErrnoStatus("find", asked.string(), error.value());
  // Drops a slash at the end, so that the path of a folder does not depend on
  // whether the folder exists yet.
  if (!found.has_filename()) found = found.parent_path();
  const auto is_below = [&base](const fs::path& one) {
    return std::mismatch(base.begin(), base.end(), one.begin(), one.end())
               .first == base.end();
  };
  if (!is_below(found)) return outside("");
  // Checks the entries of the folder and of its subfolders, which are for
  // example the tables of a checkpoint.
  fs::recursive_directory_iterator entry(found, error);
  for (; !error && entry != fs::recursive_directory_iterator();
       entry.increment(error)) {
    if (entry.depth() > 0) entry.disable_recursion_pending();
    std::error_code unknown;
    if (!entry->is_symlink(unknown)) {
      // An entry that has disappeared meanwhile was a temporary file.
      if (!unknown || unknown.value() == ENOENT) continue;
      return ErrnoStatus("examine", entry->path().string(), unknown.value());
    }
    const fs::path target = fs::canonical(entry->path(), unknown);
    if (unknown || !is_below(target)) {
      return outside(
          absl::StrCat(": '", entry->path().string(), "' leads away"));
    }
  }
  if (error && error.value() != ENOENT) {
    return ErrnoStatus("examine folder", found.string(), error.value());
  }
  return found.string();
}

absl::Status WriteAll(int fd, const std::string& path, const char* bytes,
                      size_t size) {
  while (size > 0) {
    const ssize_t written = write(fd, bytes, size);
    if (written < 0) {
      if (errno == EINTR) continue;
      return ErrnoStatus("write", path, errno);
    }
    bytes += written;
    size -= static_cast<size_t>(written);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ListFolder(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entry(folder, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  if (error) return ErrnoStatus("list folder", folder, error.value());
  return names;
}

absl::Status CreateFolders(const std::string& folder) {
  std::error_code error;
  if (fs::is_directory(folder, error)) return absl::OkStatus();
  const fs::path parent = fs::path(folder).parent_path();
  if (!parent.empty() && parent != folder) {
    TFSWITCH_RETURN_IF_ERROR(CreateFolders(parent.string()));
  }
  fs::create_directory(folder, error);
  if (error) return ErrnoStatus("create folder", folder, error.value());
  return SyncFolder(parent.empty() ? "." : parent.string());
}

absl::StatusOr<FileStamp> StampOf(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) {
    return ErrnoStatus("examine", path, errno);
  }
  return StampIn(info);
}

absl::Status SyncFolder(const std::string& folder) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus("open folder", folder, errno);
  auto close_folder = absl::MakeCleanup([fd] { close(fd); });
  if (fsync(fd) != 0) return ErrnoStatus("flush folder", folder, errno);
  return absl::OkStatus();
}

namespace {

constexpr size_t kPageBytes = 4096;  // A multiple of disks' block sizes.
constexpr size_t kDirectBytes = size_t{4} << 20;

// Turns O_DIRECT, which bypasses the page cache, on or off. Returns false if
// the file system does not support it.
bool SetDirect(int fd, bool is_direct) {
  const int flags = fcntl(fd, F_GETFL);
  return flags >= 0 &&
         fcntl(fd, F_SETFL, is_direct ? flags | O_DIRECT : flags & ~O_DIRECT) ==
             0;
}

// Copies the pieces into `buffer` and writes them from there. All writes except
// the last have whole pages.
absl::Status WriteDirectly(int fd, const std::string& path,
                           absl::Span<const absl::Span<const char>> pieces,
                           const PageBuffer& buffer) {
  size_t size = 0;
  bool is_direct = true;
  const auto flush = [&]() -> absl::Status {
    size_t done = 0;
    while (is_direct && done < size) {
      // O_DIRECT accepts only whole pages. So the end of the file is written
      // without O_DIRECT, and so is the rest after a short write.
      is_direct = (size - done) % kPageBytes == 0;
      if (!is_direct) break;
      const ssize_t written = write(fd, buffer.data() + done, size - done);
      if (written >= 0) done += static_cast<size_t>(written);
      if (written >= 0 || errno == EINTR) continue;
      // Some file systems accept O_DIRECT but fail at the first write.
      if (errno != EINVAL) return ErrnoStatus("write", path, errno);
      is_direct = false;
    }
    if (done < size) SetDirect(fd, false);
    const size_t rest = std::exchange(size, 0) - done;
    return WriteAll(fd, path, buffer.data() + done, rest);
  };
  for (absl::Span<const char> piece : pieces) {
    while (!piece.empty()) {
      const size_t some = std::min(piece.size(), kDirectBytes - size);
      CopyBytes(buffer.data() + size, piece.data(), some);
      piece.remove_prefix(some);
      size += some;
      if (size == kDirectBytes) TFSWITCH_RETURN_IF_ERROR(flush());
    }
  }
  return flush();
}

}  // namespace

bool PageBuffer::Reserve(size_t bytes) {
  if (data_ != nullptr && bytes <= capacity_) return true;
  if (bytes > std::numeric_limits<size_t>::max() - kPageBytes) return false;
  const size_t capacity = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  data_.reset();
  data_.reset(static_cast<char*>(std::aligned_alloc(kPageBytes, capacity)));
  capacity_ = data_ != nullptr ? capacity : 0;
  return data_ != nullptr;
}

absl::Status ReadFromStart(int fd, const std::string& path, size_t size,
                           const PageBuffer& buffer) {
  bool is_direct = size >= kDirectBytes && SetDirect(fd, true);
  for (size_t done = 0; done < size;) {
    // O_DIRECT cannot read a part of a page, and some file systems fail only at
    // the first read.
    if (is_direct && done % kPageBytes != 0) is_direct = !SetDirect(fd, false);
    const size_t wanted = std::min(kDirectBytes, buffer.capacity() - done);
    const ssize_t got =
        pread(fd, buffer.data() + done, wanted, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EINVAL && is_direct) {
      is_direct = false;
      if (SetDirect(fd, false)) continue;
    }
    if (got < 0) return ErrnoStatus("read", path, errno);
    if (got == 0) {
      return absl::OutOfRangeError(
          absl::StrCat("'", path, "' ended while being read"));
    }
    done += static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

absl::Status WriteFileAtomically(
    const std::string& path, absl::Span<const absl::Span<const char>> pieces) {
  const std::string temporary =
      absl::StrCat(path, ".", absl::Hex(DrawId()), ".tmp");
  const int fd =
      open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoStatus("create", temporary, errno);
  auto remove_temporary =
      absl::MakeCleanup([&temporary] { unlink(temporary.c_str()); });
  {
    auto close_file = absl::MakeCleanup([fd] { close(fd); });
    size_t size = 0;
    for (const absl::Span<const char> piece : pieces) size += piece.size();
    PageBuffer buffer;
    if (size >= kDirectBytes && buffer.Reserve(kDirectBytes) &&
        SetDirect(fd, true)) {
      TFSWITCH_RETURN_IF_ERROR(WriteDirectly(fd, temporary, pieces, buffer));
    } else {
      for (const absl::Span<const char> piece : pieces) {
        TFSWITCH_RETURN_IF_ERROR(
            WriteAll(fd, temporary, piece.data(), piece.size()));
      }
    }
    if (fsync(fd) != 0) return ErrnoStatus("flush", temporary, errno);
  }
  if (rename(temporary.c_str(), path.c_str()) != 0) {
    return ErrnoStatus("publish", path, errno);
  }
  std::move(remove_temporary).Cancel();
  // The rename itself must survive a crash.
  return SyncFolder(FolderOf(path));
}

absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view contents) {
  return WriteFileAtomically(
      path, {absl::MakeConstSpan(contents.data(), contents.size())});
}

absl::StatusOr<int> OpenRegularFile(const std::string& path) {
  // Without O_NONBLOCK, opening a pipe would wait for its writer.
  const int fd = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus("open", path, errno);
  auto close_file = absl::MakeCleanup([fd] { close(fd); });
  struct stat info;
  if (fstat(fd, &info) != 0) return ErrnoStatus("examine", path, errno);
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "'", path, "' is a folder, a pipe or a device; give a regular file"));
  }
  std::move(close_file).Cancel();
  return fd;
}

absl::StatusOr<std::string> ReadWholeFile(const std::string& path,
                                          size_t max_bytes) {
  TFSWITCH_ASSIGN_OR_RETURN(const int fd, OpenRegularFile(path));
  auto close_file = absl::MakeCleanup([fd] { close(fd); });
  std::string contents;
  char buffer[16384];
  for (;;) {
    const ssize_t got = read(fd, buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus("read", path, errno);
    if (got == 0) return contents;
    contents.append(buffer, static_cast<size_t>(got));
    if (contents.size() > max_bytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat("file '", path, "' is longer than the ", max_bytes,
                       " bytes that are expected of it"));
    }
  }
}

absl::StatusOr<std::unique_ptr<FolderLock>> FolderLock::Take(
    const std::string& folder, absl::Duration wait,
    const std::function<absl::Status()>& interrupt) {
  const std::string path = absl::StrCat(folder, "/.lock");
  const int fd =
      open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoStatus("create", path, errno);
  // Also locks the folder itself: if somebody removes the lock file, this
  // second lock remains. NFS cannot lock folders.
  const int folder_fd =
      open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  auto lock = absl::WrapUnique(new FolderLock(fd, folder_fd));
  const auto try_to_lock = [fd, folder_fd] {
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) return false;
    if (flock(folder_fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) {
      return true;
    }
    flock(fd, LOCK_UN);
    errno = EWOULDBLOCK;
    return false;
  };
  const absl::Time begin = SteadyNow();
  bool said = false;
  while (!try_to_lock()) {
    if (errno == ENOSYS || errno == EOPNOTSUPP || errno == ENOLCK) {
      return nullptr;
    }
    if (errno != EWOULDBLOCK && errno != EINTR) {
      return ErrnoStatus("lock", path, errno);
    }
    const absl::Duration waited = SteadyNow() - begin;
    if (waited >= wait) {
      return absl::AbortedError(absl::StrCat(
          "another process writes to '", folder, "'; wait for it, or end it"));
    }
    TFSWITCH_RETURN_IF_ERROR(interrupt());
    if (!said && waited >= absl::Seconds(1)) {
      LogMessage(LogLevel::kInfo, {"folder_waits"},
                 absl::StrCat("waiting for another process that writes to '",
                              folder, "'"));
      said = true;
    }
    absl::SleepFor(absl::Milliseconds(20));
  }
  return lock;
}

FolderLock::~FolderLock() {
  // Unlocks first, because forked children still have the descriptors, so that
  // close() alone would not release the locks.
  for (const int fd : {folder_fd_, fd_}) {
    if (fd < 0) continue;
    flock(fd, LOCK_UN);
    close(fd);
  }
}

absl::StatusOr<std::unique_ptr<MappedFile>> MappedFile::Map(
    int fd, const std::string& path) {
  struct stat info;
  if (fstat(fd, &info) != 0) return ErrnoStatus("examine", path, errno);
  const auto size = static_cast<size_t>(info.st_size);
  if (size == 0) {
    return absl::WrapUnique(new MappedFile(nullptr, 0, StampIn(info)));
  }
  void* const data = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return ErrnoStatus("map", path, errno);
  return absl::WrapUnique(
      new MappedFile(static_cast<const char*>(data), size, StampIn(info)));
}

absl::StatusOr<std::unique_ptr<MappedFile>> MappedFile::Copy(
    int fd, const std::string& path) {
  struct stat info;
  if (fstat(fd, &info) != 0) return ErrnoStatus("examine", path, errno);
  const auto size = static_cast<size_t>(info.st_size);
  if (size == 0) return Map(fd, path);
  void* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return ErrnoStatus("copy", path, errno);
  auto* const data = static_cast<char*>(memory);
  std::unique_ptr<MappedFile> copy =
      absl::WrapUnique(new MappedFile(data, size, StampIn(info)));
  madvise(memory, size, MADV_HUGEPAGE);
  for (size_t at = 0; at < size;) {
    const ssize_t read =
        pread(fd, data + at, size - at, static_cast<off_t>(at));
    if (read < 0 && errno == EINTR) continue;
    if (read < 0) return ErrnoStatus("read", path, errno);
    if (read == 0) {
      return absl::DataLossError(
          absl::StrCat("'", path, "' has become shorter"));
    }
    at += static_cast<size_t>(read);
  }
  if (mprotect(memory, size, PROT_READ) != 0) {
    return ErrnoStatus("protect", path, errno);
  }
  return copy;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<char*>(data_), size_);
}

}  // namespace tfswitch
