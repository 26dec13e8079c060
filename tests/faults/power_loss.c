// A journal of all calls that change files below a folder, for programs that
// are started with this library in LD_PRELOAD. From the journal power_loss.py
// makes the folders that a power loss may leave.
//
//   POWER_LOSS_BELOW     the folder
//   POWER_LOSS_JOURNAL   a file outside of it, to which records are appended
//   POWER_LOSS_BOOT_ID   a file with the boot id that the program is to see
//
// Files and folders are named by their inodes, because names change and may be
// reused while a file is open. A call and its record are under one mutex: the
// order of records is the order of calls. No call writes to shared mappings.
// They are compared with their last known bytes before each record, and a
// change of them is a write of its own. Calls that the programs do not make are
// left out: a test sees that the journal has all.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

enum kind {
  kCreate,
  kMakeFolder,
  kWrite,
  kResize,
  kRename,
  kRemove,
  kLink,
  kSync
};

// As _HEADER of power_loss.py has it. Both names and the data follow it.
struct record {
  uint32_t kind;
  uint32_t name_bytes;
  uint32_t to_name_bytes;
  uint32_t data_bytes;
  uint64_t inode;
  uint64_t folder;
  uint64_t to_folder;
  uint64_t at;  // Of a write; the new size of kResize.
};

static struct mapping {
  const char* memory;
  char* known;
  size_t size;
  uint64_t inode;
} mappings[8];

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static const char* below;
static int journal = -1;

static void append(struct record record, const char* name, const char* to_name,
                   const void* data) {
  record.name_bytes = (uint32_t)strlen(name);
  record.to_name_bytes = (uint32_t)strlen(to_name);
  const struct iovec parts[] = {{&record, sizeof(record)},
                                {(void*)name, record.name_bytes},
                                {(void*)to_name, record.to_name_bytes},
                                {(void*)data, record.data_bytes}};
  size_t size = 0;
  for (int i = 0; i < 4; ++i) size += parts[i].iov_len;
  if (REAL(writev)(journal, parts, 4) != (ssize_t)size) abort();
}

static void note_mappings(void) {
  for (struct mapping* m = mappings; m < mappings + 8; ++m) {
    if (m->size == 0 || memcmp(m->memory, m->known, m->size) == 0) continue;
    memcpy(m->known, m->memory, m->size);
    append(
        (struct record){
            .kind = kWrite, .inode = m->inode, .data_bytes = (uint32_t)m->size},
        "", "", m->known);
  }
}

static void note(struct record record, const char* name, const char* to_name,
                 const void* data) {
  const int error = errno;
  note_mappings();
  append(record, name, to_name, data);
  errno = error;
}

__attribute__((constructor)) static void begin(void) {
  const char* path = getenv("POWER_LOSS_JOURNAL");
  if (path == NULL) return;
  journal = REAL(open)(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  if (journal < 0) abort();
  below = getenv("POWER_LOSS_BELOW");
}

__attribute__((destructor)) static void end(void) {
  if (below != NULL) note_mappings();
}

static int is_below(const char* path) {
  const size_t size = strlen(below);
  return strncmp(path, below, size) == 0 &&
         (path[size] == '/' || path[size] == '\0');
}

// The inode of an open file below the folder; 0: of another one.
static uint64_t inode_of(int fd) {
  char link[64];
  char path[PATH_MAX];
  struct stat info;
  if (below == NULL) return 0;
  const int error = errno;
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t size = readlink(link, path, sizeof(path) - 1);
  errno = error;
  if (size < 0) return 0;
  path[size] = '\0';
  return is_below(path) && fstat(fd, &info) == 0 ? info.st_ino : 0;
}

struct place {
  char path[2 * PATH_MAX];
  const char* name;  // The last part of `path`.
  uint64_t folder;
  struct stat info;  // Before the call.
  int is_there;
};

// Whether the path is below the folder. Takes the mutex if it is.
static int find(int at, const char* path, struct place* place) {
  struct stat info;
  if (below == NULL) return 0;
  const int error = errno;
  size_t size = 0;
  if (path[0] != '/') {
    char link[64] = "/proc/self/cwd";
    if (at != AT_FDCWD) snprintf(link, sizeof(link), "/proc/self/fd/%d", at);
    const ssize_t got = readlink(link, place->path, PATH_MAX);
    if (got > 0) size = (size_t)got;
    place->path[size++] = '/';
  }
  snprintf(place->path + size, PATH_MAX, "%s", path);
  size = strlen(place->path);
  while (size > 1 && place->path[size - 1] == '/') place->path[--size] = '\0';
  if (!is_below(place->path)) return 0;
  pthread_mutex_lock(&mutex);
  char* const slash = strrchr(place->path, '/');
  *slash = '\0';
  place->folder = stat(place->path, &info) == 0 ? info.st_ino : 0;
  *slash = '/';
  place->name = slash + 1;
  place->is_there = lstat(place->path, &place->info) == 0;
  errno = error;
  return 1;
}

static void unlock(void) { pthread_mutex_unlock(&mutex); }

int openat(int at, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  const char* boot_id = getenv("POWER_LOSS_BOOT_ID");
  if (boot_id != NULL && strcmp(path, "/proc/sys/kernel/random/boot_id") == 0) {
    path = boot_id;
  }
  struct place place;
  const int changes = (flags & (O_CREAT | O_TRUNC)) != 0;
  if (!changes || !find(at, path, &place)) {
    return REAL(openat)(at, path, flags, mode);
  }
  const int fd = REAL(openat)(at, path, flags, mode);
  if (fd >= 0 && !place.is_there) {
    note(
        (struct record){
            .kind = kCreate, .inode = inode_of(fd), .folder = place.folder},
        place.name, "", "");
  } else if (fd >= 0 && (flags & O_TRUNC) != 0 && place.info.st_size > 0) {
    note((struct record){.kind = kResize, .inode = inode_of(fd)}, "", "", "");
  }
  unlock();
  return fd;
}

// Without a mode, the register of the argument has anything.
#define OPEN(name)                                                       \
  int name(const char* path, int flags, ...) {                           \
    va_list arguments;                                                   \
    va_start(arguments, flags);                                          \
    const mode_t mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0; \
    va_end(arguments);                                                   \
    return openat(AT_FDCWD, path, flags, mode);                          \
  }
OPEN(open)
OPEN(open64)

ssize_t write(int fd, const void* bytes, size_t size) {
  const uint64_t inode = inode_of(fd);
  if (inode == 0) return REAL(write)(fd, bytes, size);
  pthread_mutex_lock(&mutex);
  const ssize_t written = REAL(write)(fd, bytes, size);
  if (written > 0) {
    // With O_APPEND, too, the position is behind the bytes now.
    const uint64_t end = (uint64_t)lseek(fd, 0, SEEK_CUR);
    note((struct record){.kind = kWrite,
                         .inode = inode,
                         .at = end - (uint64_t)written,
                         .data_bytes = (uint32_t)written},
         "", "", bytes);
  }
  unlock();
  return written;
}

// A call for an open file: its record has the size of the file.
#define ON_OPEN_FILE(type, name, declared, passed, kind_of_record) \
  type name declared {                                             \
    const uint64_t inode = inode_of(fd);                           \
    if (inode == 0) return REAL(name) passed;                      \
    pthread_mutex_lock(&mutex);                                    \
    const type result = REAL(name) passed;                         \
    struct stat info;                                              \
    if (result == 0 && fstat(fd, &info) == 0) {                    \
      note((struct record){.kind = (kind_of_record),               \
                           .inode = inode,                         \
                           .at = (uint64_t)info.st_size},          \
           "", "", "");                                            \
    }                                                              \
    unlock();                                                      \
    return result;                                                 \
  }
ON_OPEN_FILE(int, fsync, (int fd), (fd), kSync)
ON_OPEN_FILE(int, fdatasync, (int fd), (fd), kSync)
ON_OPEN_FILE(int, ftruncate, (int fd, off_t size), (fd, size), kResize)
ON_OPEN_FILE(int, posix_fallocate, (int fd, off_t at, off_t size),
             (fd, at, size), kResize)

int mkdir(const char* path, mode_t mode) {
  struct place place;
  if (!find(AT_FDCWD, path, &place)) return REAL(mkdir)(path, mode);
  const int result = REAL(mkdir)(path, mode);
  if (result == 0 && lstat(place.path, &place.info) == 0) {
    note((struct record){.kind = kMakeFolder,
                         .inode = place.info.st_ino,
                         .folder = place.folder},
         place.name, "", "");
  }
  unlock();
  return result;
}

int unlinkat(int at, const char* path, int flags) {
  struct place place;
  if (!find(at, path, &place)) return REAL(unlinkat)(at, path, flags);
  const int result = REAL(unlinkat)(at, path, flags);
  if (result == 0) {
    note((struct record){.kind = kRemove,
                         .inode = place.info.st_ino,
                         .folder = place.folder},
         place.name, "", "");
  }
  unlock();
  return result;
}

int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }

int rmdir(const char* path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int remove(const char* path) {
  struct stat info;
  const int is_folder = lstat(path, &info) == 0 && S_ISDIR(info.st_mode);
  return is_folder ? rmdir(path) : unlink(path);
}

#define FROM_TO(call, kind_of_record)                                \
  int call(const char* from, const char* to) {                       \
    struct place source;                                             \
    struct place target;                                             \
    if (!find(AT_FDCWD, from, &source)) return REAL(call)(from, to); \
    unlock();                                                        \
    if (!find(AT_FDCWD, to, &target)) abort();                       \
    const int result = REAL(call)(from, to);                         \
    if (result == 0) {                                               \
      note((struct record){.kind = (kind_of_record),                 \
                           .inode = source.info.st_ino,              \
                           .folder = source.folder,                  \
                           .to_folder = target.folder},              \
           source.name, target.name, "");                            \
    }                                                                \
    unlock();                                                        \
    return result;                                                   \
  }
FROM_TO(rename, kRename)
FROM_TO(link, kLink)

// Libraries that are opened with RTLD_DEEPBIND would call those of libc. It is
// for programs without TensorFlow, which has other copies of what they use.
void* dlopen(const char* path, int flags) {
  return REAL(dlopen)(path, flags & ~RTLD_DEEPBIND);
}

void* mmap(void* hint, size_t size, int rights, int flags, int fd, off_t at) {
  void* const memory = REAL(mmap)(hint, size, rights, flags, fd, at);
  const int is_shared = (flags & MAP_SHARED) != 0 && (rights & PROT_WRITE) != 0;
  if (!is_shared || fd < 0 || memory == MAP_FAILED) return memory;
  const uint64_t inode = inode_of(fd);
  if (inode == 0) return memory;
  pthread_mutex_lock(&mutex);
  struct mapping* m = mappings;
  while (m->size > 0) ++m;
  if (m == mappings + 8 || at != 0) abort();
  *m = (struct mapping){memory, malloc(size), size, inode};
  memcpy(m->known, memory, size);
  unlock();
  return memory;
}

static struct mapping* mapping_at(const void* memory) {
  for (struct mapping* m = mappings; m < mappings + 8; ++m) {
    if (m->size > 0 && m->memory == memory) return m;
  }
  return NULL;
}

int msync(void* memory, size_t size, int flags) {
  const struct mapping* m = mapping_at(memory);
  if (m == NULL) return REAL(msync)(memory, size, flags);
  pthread_mutex_lock(&mutex);
  const int result = REAL(msync)(memory, size, flags);
  if (result == 0 && (flags & MS_SYNC) != 0) {
    note((struct record){.kind = kSync, .inode = m->inode}, "", "", "");
  }
  unlock();
  return result;
}

int munmap(void* memory, size_t size) {
  struct mapping* m = mapping_at(memory);
  if (m != NULL) {
    pthread_mutex_lock(&mutex);
    note_mappings();
    m->size = 0;
    unlock();
  }
  return REAL(munmap)(memory, size);
}
