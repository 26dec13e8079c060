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

// Returns the error "cannot WHAT 'PATH': ..." for the errno value `error`, with
// the matching status code.
absl::Status ErrnoStatus(absl::string_view what, const std::string& path,
                         int error);

// Converts any text to the name of a file or folder. Letters, digits, '-', '_'
// and dots stay the same, except a dot at the beginning. Other bytes become
// %XX.
std::string FileNameOf(absl::string_view text);

// InvalidArgument unless `id` can be part of a file name: 1 to 64 letters,
// digits, '-' and '_'. Callers choose the ids. `what` names the id in errors.
absl::Status CheckId(absl::string_view what, absl::string_view id);

// The default folder below which clients' paths must be: the folder in which
// the server was started, or "" if that is "/".
std::string DefaultRoot();

// Makes `path` absolute; relative paths are relative to the current folder.
std::string AbsolutePath(const std::string& path);

// Returns the folder that a client's `path` means; relative paths are relative
// to the folder `root`. PermissionDenied if the result would be outside of
// `root`: for an absolute path not below `root`, a ".." in the path, or a
// symbolic link that leads out, in the path or up to two levels below it.
absl::StatusOr<std::string> ResolveBelow(const std::string& root,
                                         const std::string& path);

// Writes all of `bytes` to an open file; `path` is for the error.
absl::Status WriteAll(int fd, const std::string& path, const char* bytes,
                      size_t size);

// The names in a folder, in no order. NotFound if there is no such folder.
absl::StatusOr<std::vector<std::string>> ListFolder(const std::string& folder);

// Makes a folder and its missing parents, and flushes them to the disk.
absl::Status CreateFolders(const std::string& folder);

// Identifies a version of a file. It changes when the file is replaced or
// written to.
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

// Opens a file for reading. FailedPrecondition if it is not a regular file.
absl::StatusOr<int> OpenRegularFile(const std::string& path);

// Flushes a folder to the disk, so that files that were created or renamed in
// it survive a crash.
absl::Status SyncFolder(const std::string& folder);

// Page-aligned memory of whole pages, for files that bypass the system's page
// cache.
class PageBuffer {
 public:
  // Makes room for at least so many bytes. False if there is no memory for
  // them; the buffer then stays as it was.
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
// has room for them. OutOfRange if the file is shorter. For a long file,
// bypasses the page cache if the file system supports that.
absl::Status ReadFromStart(int fd, const std::string& path, size_t size,
                           const PageBuffer& buffer);

// Writes `pieces` to a temporary file in the same folder, whose name no other
// writer uses. Then flushes the file to the disk and renames it to `path`. Long
// files bypass the page cache: copying to the cache would take as long as the
// rest of a save, and the cache would take memory that rows could use.
absl::Status WriteFileAtomically(
    const std::string& path, absl::Span<const absl::Span<const char>> pieces);
absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view contents);

// NotFound if there is no such file, FailedPrecondition if it is not a regular
// file, ResourceExhausted if it is longer than `max_bytes`.
absl::StatusOr<std::string> ReadWholeFile(const std::string& path,
                                          size_t max_bytes);

// Locks a folder for writing. At any time at most one process can hold the
// lock.
class FolderLock {
 public:
  // If another process holds the lock, waits for it, at most `wait`; then
  // returns Aborted. Returns null on file systems without locks; the user must
  // make sure that nobody else writes there. After a second, logs that it
  // waits. An error of `interrupt` ends the wait and is returned.
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
// file may be deleted while it is mapped (on NFS not by another machine). If
// the file becomes shorter, a read behind its new end kills the process.
//
// Immutable, so thread-safe.
class MappedFile {
 public:
  // Maps an open file; the caller still owns the descriptor.
  static absl::StatusOr<std::unique_ptr<MappedFile>> Map(
      int fd, const std::string& path);
  // Copies an open file into memory of this process. The kernel may use huge
  // pages for the copy, which it may not support for mapped files.
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
