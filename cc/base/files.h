// Writes files whole or not at all, and maps files as memory.

#ifndef TFSWITCH_CC_BASE_FILES_H_
#define TFSWITCH_CC_BASE_FILES_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace tfswitch {

// "cannot WHAT 'PATH': ...", with the code that fits errno value `error`.
absl::Status ErrnoStatus(absl::string_view what, const std::string& path,
                         int error);

// A file or folder name for any text: letters, digits, '-', '_' and dots that
// are not first stay, each other byte becomes %XX.
std::string FileNameOf(absl::string_view text);

// InvalidArgument unless `id`, which names `what` and comes from outside, can
// be part of a file name: 1 to 64 letters, digits, '-' and '_'.
absl::Status CheckId(absl::string_view what, absl::string_view id);

// The default folder for clients' paths: the folder in which the server was
// started, or "" if that is "/".
std::string DefaultRoot();

// Makes `path` absolute; a relative one starts at the current folder.
std::string AbsolutePath(const std::string& path);

// The folder of a client's `path`, which starts at the folder `root`.
// PermissionDenied if it would be outside: an absolute path not below `root`, a
// ".." in it, or a symbolic link that leads away, in the path or up to two
// levels below it.
absl::StatusOr<std::string> ResolveBelow(const std::string& root,
                                         const std::string& path);

// Writes all of `bytes` to an open file; `path` is for the error.
absl::Status WriteAll(int fd, const std::string& path, const char* bytes,
                      size_t size);

// The names in a folder, in no order. NotFound if there is no such folder.
absl::StatusOr<std::vector<std::string>> ListFolder(const std::string& folder);

// Makes a folder and those above it, unless it is there, flushed to the disk.
absl::Status CreateFolders(const std::string& folder);

// Tells whether a file was replaced or written to.
struct FileStamp {
  uint64_t device = 0;
  uint64_t inode = 0;
  int64_t size = 0;
  int64_t changed_ns = 0;

  friend bool operator==(const FileStamp& a, const FileStamp& b) {
    return a.device == b.device && a.inode == b.inode && a.size == b.size &&
           a.changed_ns == b.changed_ns;
  }
};
absl::StatusOr<FileStamp> StampOf(const std::string& path);

// Opens a file for reading. FailedPrecondition if it is no regular one.
absl::StatusOr<int> OpenRegularFile(const std::string& path);

// Flushes a folder to the disk: files that were created or renamed in it
// survive a crash.
absl::Status SyncFolder(const std::string& folder);

// Page-aligned memory of whole pages, for files that bypass the system's page
// cache.
class PageBuffer {
 public:
  // False if there is no memory for it; the present memory stays.
  bool Reserve(size_t bytes);
  char* data() const { return data_.get(); }
  size_t capacity() const { return capacity_; }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> data_;
  size_t capacity_ = 0;
};

// Reads `size` bytes from the beginning of an open file into `buffer`, which
// has room for them. OutOfRange if the file is shorter. A long file bypasses
// the page cache, if the file system can do that.
absl::Status ReadFromStart(int fd, const std::string& path, size_t size,
                           const PageBuffer& buffer);

// Writes `pieces` to a temporary file in the same folder, whose name no other
// writer uses, flushes it to the disk and renames it to `path`. A long file
// bypasses the page cache: a copy there would cost as much as the rest of a
// save, and take memory from rows.
absl::Status WriteFileAtomically(
    const std::string& path, absl::Span<const absl::Span<const char>> pieces);
absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view contents);

// NotFound if there is no such file, FailedPrecondition if it is no regular
// one, ResourceExhausted if it is longer than `max_bytes`.
absl::StatusOr<std::string> ReadWholeFile(const std::string& path,
                                          size_t max_bytes);

// A lock of a folder: of all processes that use it, one at a time may write
// there.
class FolderLock {
 public:
  // Waits at most `wait` for the present writer; then Aborted. Null on file
  // systems without locks, where nobody else may write. After a second a line
  // on stderr says that it waits. An error of `interrupt` ends the wait and is
  // returned.
  static absl::StatusOr<std::unique_ptr<FolderLock>> Take(
      const std::string& folder, absl::Duration wait,
      const std::function<absl::Status()>& interrupt);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  FolderLock(int fd, int folder_fd) : fd_(fd), folder_fd_(folder_fd) {}
  const int fd_;
  const int folder_fd_;
};

// A whole file as read-only memory, shared with all processes that map it. The
// file may be deleted meanwhile (on NFS not by another machine). If it becomes
// shorter, reading behind its new end ends the process.
//
// Immutable, so thread-safe.
class MappedFile {
 public:
  // Maps an open file; the caller keeps the descriptor.
  static absl::StatusOr<std::unique_ptr<MappedFile>> Map(
      int fd, const std::string& path);
  // Copies an open file into memory of this process, in huge pages if the
  // kernel has them; for mapped files it may not.
  static absl::StatusOr<std::unique_ptr<MappedFile>> Copy(
      int fd, const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const char* data() const { return data_; }
  size_t size() const { return size_; }
  // At its opening.
  const FileStamp& stamp() const { return stamp_; }

 private:
  MappedFile(const char* data, size_t size, const FileStamp& stamp)
      : data_(data), size_(size), stamp_(stamp) {}

  const char* const data_;
  const size_t size_;
  const FileStamp stamp_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_FILES_H_
