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

unsigned long faults_draw(void) { return draw; }

// Stop, and tell how many messages there were.
long faults_disarm(void) {
  fault = kNone;
  return sent;
}

// The bytes of the message that was hit, or -1.
long faults_planted(void) { return planted - 1; }

// Elements that travel as they are have none of ours.
static int has_checksum(const void* data, long count) { return count >= 32 && !memcmp(data, "HYC\x01", 4); }

// Count a message; say what is to happen to it.
int faults_take(const void* data, long count) {
  ++sent;
  const int kind = fault;
  if (kind == kNone || left-- != 0 || (kind == kDamage && !has_checksum(data, count))) return kNone;
  planted = count + 1;
  return kind;
}

// The bytes that are left of a truncated message. Sends tell encoded messages from plain ones by an odd
// length, which no MPI changes; so it stays odd.
long faults_cut(long count) {
  const long cut = count ? (long)(draw % (unsigned long)count) : 0;
  return count % 2 == 0 || cut % 2 ? cut : cut ? cut - 1 : 1;
}

int faults_isend(const void* data, int count, void* type, int peer, int tag, void* comm, void* request) {
  const int kind = faults_take(data, count);
  if (kind == kDelay) {
    const struct timespec pause = {0, 20000000L + (long)(draw % 300000000UL)};
    nanosleep(&pause, NULL);
  } else if (kind == kDrop) {
    return mpi_isend(NULL, 0, type, proc_null, tag, comm, request);
  } else if (kind == kTruncate) {
    count = (int)faults_cut(count);
  } else if (kind == kDamage) {
    char* const copy = malloc((size_t)count);  // nobody knows when MPI has read it
    memcpy(copy, data, (size_t)count);
    const unsigned long bit = draw % (8UL * (unsigned long)count);
    copy[bit / 8] ^= (char)(1 << bit % 8);
    data = copy;
  }
  return mpi_isend(data, count, type, peer, tag, comm, request);
}
