// MPI_Isend with a fault: the k-th message from the call of `arm` on is damaged, truncated, delayed or
// dropped.
//
// The engine is given this function's address in place of MPI's. Handles, which are integers in one MPI and
// pointers in another, are passed on as they come.
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int (*Isend)(const void*, int, void*, int, int, void*, void*);

enum { kNone, kDamage, kTruncate, kDelay, kDrop };

static Isend mpi_isend;
static int proc_null;
static atomic_int fault;
static atomic_long left, sent, planted;
static unsigned long draw;

void faults_bind(Isend isend, int null) {
  mpi_isend = isend;
  proc_null = null;
}

void faults_arm(int kind, long k, unsigned long random) {
  draw = random;
  planted = 0;
  sent = 0;
  left = k;
  fault = kind;
}

// Stop, and tell how many messages there were.
long faults_disarm(void) {
  fault = kNone;
  return sent;
}

// The bytes of the message that was hit, or -1.
long faults_planted(void) { return planted - 1; }

// Elements that travel as they are have none of ours.
static int has_checksum(const void* data, int count) { return count >= 32 && !memcmp(data, "HYC\x01", 4); }

int faults_isend(const void* data, int count, void* type, int peer, int tag, void* comm, void* request) {
  ++sent;
  const int kind = fault;
  if (kind == kNone || left-- != 0 || (kind == kDamage && !has_checksum(data, count)))
    return mpi_isend(data, count, type, peer, tag, comm, request);
  planted = count + 1L;
  if (kind == kDelay) {
    const struct timespec pause = {0, 20000000L + (long)(draw % 300000000UL)};
    nanosleep(&pause, NULL);
  } else if (kind == kDrop) {
    return mpi_isend(NULL, 0, type, proc_null, tag, comm, request);
  } else if (kind == kTruncate) {
    count = count ? (int)(draw % (unsigned long)count) : 0;
  } else if (count) {
    char* const copy = malloc((size_t)count);  // nobody knows when MPI has read it
    memcpy(copy, data, (size_t)count);
    const unsigned long bit = draw % (8UL * (unsigned long)count);
    copy[bit / 8] ^= (char)(1 << bit % 8);
    data = copy;
  }
  return mpi_isend(data, count, type, peer, tag, comm, request);
}
