// MPI's functions behind one lock, as MPICH has them, and a call that does not come back while it holds that.
//
// Preloaded: mpi4py finds these. Handles, which are integers in one MPI and pointers in another, are passed
// on as they come: the calling conventions pass either in a slot of eight bytes, and do not mind slots after
// the last argument.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef uint64_t Slot;
typedef int (*Function)(Slot, Slot, Slot, Slot, Slot, Slot, Slot, Slot);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void* mpi;
static atomic_int stuck;

// The library that has the functions.
void stuck_bind(const char* path) {
  mpi = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (!mpi) {
    fprintf(stderr, "%s\n", dlerror());
    abort();
  }
}

// From now on calls that start something do not come back.
void stuck_arm(void) { stuck = 1; }

static int call(const char* name, int starts, Slot a, Slot b, Slot c, Slot d, Slot e, Slot f, Slot g,
                Slot h) {
  const Function function = (Function)dlsym(mpi, name);
  pthread_mutex_lock(&lock);
  while (starts && stuck) sleep(1);
  const int code = function(a, b, c, d, e, f, g, h);
  pthread_mutex_unlock(&lock);
  return code;
}

#define WRAP(name, starts)                                                   \
  int name(Slot a, Slot b, Slot c, Slot d, Slot e, Slot f, Slot g, Slot h);  \
  int name(Slot a, Slot b, Slot c, Slot d, Slot e, Slot f, Slot g, Slot h) { \
    return call(#name, starts, a, b, c, d, e, f, g, h);                      \
  }

WRAP(MPI_Isend, 1)
WRAP(MPI_Iallreduce, 1)
WRAP(MPI_Irecv, 0)
WRAP(MPI_Test, 0)
WRAP(MPI_Testsome, 0)
WRAP(MPI_Request_get_status, 0)
