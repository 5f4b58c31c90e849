// End MPI when the process ends, by its exit status.
//
// MPI_Finalize waits for all ranks. A rank that leaves with an error would stay there, and its launcher,
// which ends the others once a rank has failed, would not learn of it. Python knows the exit status only
// after it has run all that mpi4py and others have registered for its end, so this is a function that the C
// library calls with it.
#pragma once

#include <string>

namespace hybridcomp::engine {

using SessionFinalize = int (*)(void*);

// Have the C library finish MPI at the end of this process: a session of MPI's, which is what keeps MPI alive
// when MPI_Finalize has been called. Where the status is not 0, or `leave_mpi` was called, the process ends
// at once instead. `session` holds a handle of `bytes` bytes. `launcher` is the socket of MPICH's mpiexec,
// -1 for none, which is told a status that is not 0: it may take a socket that has ended for a rank that was
// killed. Calls after the first have no effect.
void end_mpi_at_exit(SessionFinalize finalize, const void* session, std::size_t bytes, int launcher);

// Watch a socket that ends, or has something to read, when MPI's end would wait for ever: the process ends
// then, by its own status.
void end_without_mpi_after(int socket);

// Leave MPI as it is when this process ends. `why` says what is wrong, and is printed by a process that would
// otherwise end well, and ends with status 1; empty where its status is to stay.
void leave_mpi(const std::string& why);

// Record that the session has ended: nothing is left to do.
void mpi_has_ended();

}  // namespace hybridcomp::engine
