// A disk that fails, for programs that are started with this library in
// LD_PRELOAD and the path of a plan in FAILING_DISK. The plan is mapped, so
// that a test may change it and read the counts while the program runs, and a
// forked child counts on. Fails write, pwrite, fsync, fdatasync, ftruncate and
// rename on what lies below a folder.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// As FailingDisk of failing_disk.py has it. A write of which some bytes are
// written before it fails returns how many, and the next call fails.
struct plan {
  int64_t calls;  // Made so far, from 1 in the counting of the next two.
  int64_t first;  // Fails from this call on; 0: never.
  int64_t last;   // To this one.
  int64_t error;  // With this errno; 0: ends the process.
  int64_t bytes;  // That are written before.
  char below[PATH_MAX];
};

static struct plan* the_plan;

__attribute__((constructor)) static void open_plan(void) {
  const char* path = getenv("FAILING_DISK");
  if (path == NULL) return;
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  void* found = fd < 0 ? MAP_FAILED
                       : mmap(NULL, sizeof(struct plan), PROT_READ | PROT_WRITE,
                              MAP_SHARED, fd, 0);
  if (found == MAP_FAILED) {
    perror("FAILING_DISK");
    abort();
  }
  close(fd);
  the_plan = found;
}

static int is_below(const char* path) {
  return strncmp(path, the_plan->below, strlen(the_plan->below)) == 0;
}

// Whether a call fails, with errno set; of a write, or how many of `size` bytes
// it has to write first.
static int fails(const char* path, int fd, size_t size, size_t* first_bytes) {
  char found[PATH_MAX] = "";
  if (the_plan == NULL) return 0;
  if (path == NULL) {
    char link[64];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, found, sizeof(found) - 1);
    if (length < 0) return 0;
    path = found;
  }
  if (!is_below(path)) return 0;
  const int64_t call =
      __atomic_add_fetch(&the_plan->calls, 1, __ATOMIC_RELAXED);
  if (the_plan->first == 0 || call < the_plan->first || call > the_plan->last) {
    return 0;
  }
  const size_t bytes = (size_t)the_plan->bytes;
  if (size > 0 && bytes > 0 && call == the_plan->first) {
    *first_bytes = size < bytes ? size : bytes;
    // For the rest.
    if (the_plan->last == call) the_plan->last = call + 1;
    return 0;
  }
  if (the_plan->error == 0) _exit(9);
  errno = (int)the_plan->error;
  return 1;
}

ssize_t write(int fd, const void* bytes, size_t size) {
  static ssize_t (*real)(int, const void*, size_t);
  if (real == NULL) real = dlsym(RTLD_NEXT, "write");
  return fails(NULL, fd, size, &size) ? -1 : real(fd, bytes, size);
}

ssize_t pwrite(int fd, const void* bytes, size_t size, off_t at) {
  static ssize_t (*real)(int, const void*, size_t, off_t);
  if (real == NULL) real = dlsym(RTLD_NEXT, "pwrite");
  return fails(NULL, fd, size, &size) ? -1 : real(fd, bytes, size, at);
}

ssize_t pwrite64(int fd, const void* bytes, size_t size, off_t at) {
  return pwrite(fd, bytes, size, at);
}

int fsync(int fd) {
  static int (*real)(int);
  if (real == NULL) real = dlsym(RTLD_NEXT, "fsync");
  return fails(NULL, fd, 0, NULL) ? -1 : real(fd);
}

int fdatasync(int fd) {
  static int (*real)(int);
  if (real == NULL) real = dlsym(RTLD_NEXT, "fdatasync");
  return fails(NULL, fd, 0, NULL) ? -1 : real(fd);
}

int ftruncate(int fd, off_t size) {
  static int (*real)(int, off_t);
  if (real == NULL) real = dlsym(RTLD_NEXT, "ftruncate");
  return fails(NULL, fd, 0, NULL) ? -1 : real(fd, size);
}

int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }

int rename(const char* from, const char* to) {
  static int (*real)(const char*, const char*);
  if (real == NULL) real = dlsym(RTLD_NEXT, "rename");
  return fails(to, -1, 0, NULL) ? -1 : real(from, to);
}
