#include "engine/waiting/ending.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>

namespace hybridcomp::engine {
namespace {

struct Ending {
  std::mutex mutex;
  pid_t process = 0;  // a forked child has its parent's MPI, which is not the child's to end
  SessionFinalize finalize = nullptr;
  alignas(void*) unsigned char session[16];
  std::atomic<int> socket = -1;
  int launcher = -1;
  bool leaves = false, ended = false;
  std::string why;
};

// Never destroyed: it is used after destructors have run.
Ending& ending() {
  static Ending* const one = new Ending;
  return *one;
}

// Wait until the launcher has read what this process has written, for a second at most: MPICH's mpiexec drops
// output that it has not read when a rank aborts.
void await_reader(int file) {
  struct stat kind{};
  if (fstat(file, &kind) || !S_ISFIFO(kind.st_mode)) return;
  for (int looks = 0, unread = 0; looks < 1000 && !ioctl(file, FIONREAD, &unread) && unread > 0; ++looks)
    usleep(1000);
}

// End the process here. Destructors of libraries that MPI's threads work with would crash it.
[[noreturn]] void end(int status) {
  std::fflush(stdout);
  std::fflush(stderr);
  if (status && ending().launcher >= 0) {
    for (const int file : {STDOUT_FILENO, STDERR_FILENO}) await_reader(file);
    const std::string text = "cmd=abort exitcode=" + std::to_string(status & 0xFF) + "\n";
    // Where the launcher is gone, it needs to know nothing.
    static_cast<void>(send(ending().launcher, text.data(), text.size(), MSG_NOSIGNAL));
  }
  _exit(status);
}

// Tell whether the socket has ended or has something to read, waiting for so many milliseconds, -1 for ever.
// Returns false once `stop` can be read.
bool told(int socket, int wait, int stop = -1) {
  pollfd both[] = {{socket, POLLIN | POLLRDHUP, 0}, {stop, POLLIN, 0}};
  while (poll(both, 2, wait) < 0 && errno == EINTR) {
  }
  return both[0].revents && !both[1].revents;
}

void at_exit(int status, void*) {
  Ending& mpi = ending();
  if (getpid() != mpi.process || mpi.ended) return;
  const int socket = mpi.socket;
  const bool lost = socket >= 0 && told(socket, 0);
  if (!status && !mpi.why.empty()) {
    std::fputs(mpi.why.c_str(), stderr);
    end(1);
  }
  if (status || mpi.leaves || lost) end(status);
  const int stop = socket < 0 ? -1 : eventfd(0, EFD_CLOEXEC);
  std::thread watch;
  if (stop >= 0) {
    try {
      watch = std::thread([socket, stop] {
        if (told(socket, -1, stop)) end(0);
      });
    } catch (const std::system_error&) {  // no more threads
    }
  }
  mpi.finalize(mpi.session);
  mpi.ended = true;
  if (watch.joinable()) {
    eventfd_write(stop, 1);
    watch.join();
  }
}

}  // namespace

void end_mpi_at_exit(SessionFinalize finalize, const void* session, std::size_t bytes, int launcher) {
  Ending& mpi = ending();
  const std::lock_guard lock(mpi.mutex);
  if (mpi.process || bytes > sizeof mpi.session) return;
  mpi.process = getpid();
  mpi.finalize = finalize;
  mpi.launcher = launcher;
  std::memcpy(mpi.session, session, bytes);
  on_exit(&at_exit, nullptr);
}

void end_without_mpi_after(int socket) { ending().socket = socket; }

void leave_mpi(const std::string& why) {
  Ending& mpi = ending();
  const std::lock_guard lock(mpi.mutex);
  mpi.leaves = true;
  if (mpi.why.empty()) mpi.why = why;
}

void mpi_has_ended() { ending().ended = true; }

}  // namespace hybridcomp::engine
