// Plants faults in a process's calls of the C library: for LD_PRELOAD. Nothing fails before it is armed, by
// the functions fault_* that Python reaches through ctypes. One thing at a time is armed; a fork inherits it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define NEXT(name) __typeof__(&name) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

// -- files: the calls that change something below a folder --------------------------------------------------

enum { kCount, kKillBefore, kKillAfter, kTear, kFailOnce, kFailFromThen };

static char folder[4096];
static atomic_long calls, chosen = -1;
static int what, error_number;
static atomic_uchar watched[4096];  // descriptors of files below the folder that are open for writing

// The chosen-th call from now on that changes something below `path` (absolute; "" for none) is answered by
// `how`.
void fault_files(const char* path, long number, int how, int error) {
  strncpy(folder, path, sizeof folder - 1);
  chosen = -1;
  calls = 0;
  what = how;
  error_number = error;
  chosen = number;
}

// Return how many such calls there have been.
long fault_files_calls(void) { return calls; }

static int below(int at, const char* path) {
  if (!folder[0] || !path) return 0;
  if (at != AT_FDCWD && path[0] != '/')
    return 1;  // Python removes trees so: there is no other in these programs
  return !strncmp(path, folder, strlen(folder));
}

static int is_watched(int fd) { return folder[0] && fd >= 0 && fd < 4096 && watched[fd]; }

static void watch(int fd) {
  if (fd >= 0 && fd < 4096) watched[fd] = 1;
}

// Count a call; tell what it does: 0 as always, -1 fail.
static int begin(long* number) {
  *number = ++calls;
  if (*number == chosen && what == kKillBefore) _exit(137);
  if ((*number == chosen && what == kFailOnce) ||
      (chosen > 0 && *number >= chosen && what == kFailFromThen)) {
    errno = error_number;
    return -1;
  }
  return 0;
}

static void end(long number) {
  if (number == chosen && (what == kKillAfter || what == kTear)) _exit(137);
}

#define COUNTED(condition, call)      \
  if (!(condition)) return call;      \
  long number;                        \
  if (begin(&number)) return -1;      \
  const __typeof__(call) done = call; \
  end(number);                        \
  return done

static int opened(int at, const char* path, int flags, int mode) {
  NEXT(openat);
  if ((flags & O_ACCMODE) == O_RDONLY || !below(at, path)) return next(at, path, flags, mode);
  long number;
  if (begin(&number)) return -1;
  const int fd = next(at, path, flags, mode);
  watch(fd);
  end(number);
  return fd;
}

#define OPENS(name, ...)                                                    \
  int name(__VA_ARGS__ const char* path, int flags, ...) {                  \
    va_list rest;                                                           \
    va_start(rest, flags);                                                  \
    const int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; \
    va_end(rest);

OPENS(open, ) return opened(AT_FDCWD, path, flags, mode);
}
OPENS(open64, ) return opened(AT_FDCWD, path, flags | O_LARGEFILE, mode);
}
OPENS(openat, int at, ) return opened(at, path, flags, mode);
}
OPENS(openat64, int at, ) return opened(at, path, flags | O_LARGEFILE, mode);
}

// A write that is torn writes a half of what it is given; then the process dies.
static size_t part(int fd, size_t bytes) {
  return is_watched(fd) && what == kTear && calls + 1 == chosen ? bytes / 2 : bytes;
}

ssize_t write(int fd, const void* data, size_t bytes) {
  NEXT(write);
  const size_t wanted = part(fd, bytes);
  COUNTED(is_watched(fd), next(fd, data, wanted));
}

ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t at) {
  NEXT(pwrite64);
  const size_t wanted = part(fd, bytes);
  COUNTED(is_watched(fd), next(fd, data, wanted, at));
}

ssize_t writev(int fd, const struct iovec* parts, int count) {
  NEXT(writev);
  COUNTED(is_watched(fd), next(fd, parts, count));
}

int ftruncate64(int fd, off64_t bytes) {
  NEXT(ftruncate64);
  COUNTED(is_watched(fd), next(fd, bytes));
}

// Syncs of folders count, too, which nobody opens for writing.
int fsync(int fd) {
  NEXT(fsync);
  COUNTED(folder[0], next(fd));
}

int close(int fd) {
  NEXT(close);
  const int counts = is_watched(fd);
  if (counts) watched[fd] = 0;
  if (!counts) return next(fd);
  long number;
  const int failed = begin(&number);
  const int error = errno, done = next(fd);  // it is closed, as in Linux, whatever it answers
  errno = failed ? error : errno;
  end(number);
  return failed ? -1 : done;
}

int rename(const char* from, const char* to) {
  NEXT(rename);
  COUNTED(below(AT_FDCWD, to), next(from, to));
}

int unlink(const char* path) {
  NEXT(unlink);
  COUNTED(below(AT_FDCWD, path), next(path));
}

int unlinkat(int at, const char* path, int flags) {
  NEXT(unlinkat);
  COUNTED(below(at, path), next(at, path, flags));
}

int rmdir(const char* path) {
  NEXT(rmdir);
  COUNTED(below(AT_FDCWD, path), next(path));
}

int mkdir(const char* path, mode_t mode) {
  NEXT(mkdir);
  COUNTED(below(AT_FDCWD, path), next(path, mode));
}

// -- memory -------------------------------------------------------------------------------------------------

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void*, size_t),
    *__libc_memalign(size_t, size_t);
static atomic_size_t least;  // 0: nothing fails
static atomic_long passing, failing, refused;

// Let so many allocations of `bytes` and more succeed from now on, and then so many fail. 0 bytes: none
// fails.
void fault_memory(size_t bytes, long succeed, long fail) {
  least = 0;
  passing = succeed;
  failing = fail;
  refused = 0;
  least = bytes;
}

// Return how many allocations have failed.
long fault_memory_failed(void) { return refused; }

// MPI's libraries do not look at what malloc returns, and crash: nothing that calls them can answer for that.
static int is_of_mpi(const void* caller) {
  Dl_info library;
  if (!dladdr(caller, &library) || !library.dli_fname) return 0;
  return strstr(library.dli_fname, "/libmpi") || strstr(library.dli_fname, "/libuc") ||
         strstr(library.dli_fname, "/libfabric");
}

static int fails(size_t bytes, const void* caller) {
  const size_t from = least;
  if (!from || bytes < from || is_of_mpi(caller) || atomic_fetch_sub(&passing, 1) > 0 ||
      atomic_fetch_sub(&failing, 1) <= 0)
    return 0;
  ++refused;
  errno = ENOMEM;
  return 1;
}

#define CALLER __builtin_return_address(0)

void* malloc(size_t bytes) { return fails(bytes, CALLER) ? NULL : __libc_malloc(bytes); }

void* calloc(size_t count, size_t bytes) {
  const size_t all = bytes && count > (size_t)-1 / bytes ? (size_t)-1 : count * bytes;
  return fails(all, CALLER) ? NULL : __libc_calloc(count, bytes);
}

void* realloc(void* from, size_t bytes) { return fails(bytes, CALLER) ? NULL : __libc_realloc(from, bytes); }

void* memalign(size_t alignment, size_t bytes) {
  return fails(bytes, CALLER) ? NULL : __libc_memalign(alignment, bytes);
}

void* aligned_alloc(size_t alignment, size_t bytes) {
  return fails(bytes, CALLER) ? NULL : __libc_memalign(alignment, bytes);
}

int posix_memalign(void** to, size_t alignment, size_t bytes) {
  void* const memory = fails(bytes, CALLER) ? NULL : __libc_memalign(alignment, bytes);
  if (!memory) return ENOMEM;
  *to = memory;
  return 0;
}

// -- threads ------------------------------------------------------------------------------------------------

static atomic_long startable = -1, not_started;

// Let so many threads be started from now on, and no more; -1: any number.
void fault_threads(long number) {
  startable = -1;
  not_started = 0;
  startable = number;
}

// Return how many threads were not started.
long fault_threads_failed(void) { return not_started; }

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  NEXT(pthread_create);
  if (startable >= 0 && atomic_fetch_sub(&startable, 1) <= 0) {
    startable = 0;
    ++not_started;
    return EAGAIN;
  }
  return next(thread, attributes, run, argument);
}
