#include "engine/mpi.hpp"

#include <algorithm>
#include <cstring>

#include "engine/waiting/watchdog.hpp"

namespace hybridcomp::engine {

void Requests::test(std::vector<Done>* out) {
  if (owners_.empty()) return;
  const std::size_t n = owners_.size();
  if (indices_.size() < n) {
    indices_.resize(2 * n);
    statuses_.resize(2 * n * mpi_.status_bytes + 16);
  }
  int count = 0, code = 0;
  {
    const InsideMpi inside;
    code = mpi_.testsome(static_cast<int>(n), handles_.data(), &count, indices_.data(), statuses_.data());
  }
  if (code && count <= 0) {
    // MPI could not move some message, and does not tell which: a rank whose memory it reads has died, say.
    // MPICH reports that request as done without an error when it is tested next, with another message's
    // bytes in its buffer. So no request is trusted.
    for (const Owner& owner : owners_) out->push_back({owner, code, 0, nullptr});
    return;
  }
  if (count <= 0) return;  // none done yet, or MPI_UNDEFINED
  const std::size_t first = out->size();
  for (int i = 0; i < count; ++i) {
    const std::uint8_t* const status = statuses_.data() + static_cast<std::size_t>(i) * mpi_.status_bytes;
    Done done{owners_[static_cast<std::size_t>(indices_[i])], 0, 0, status};
    if (code) std::memcpy(&done.code, status + mpi_.error_at, sizeof(done.code));
    if (!done.code) mpi_.get_count(status, mpi_.byte, &done.bytes);
    if (done.bytes < 0) done.bytes = 0;  // MPI_UNDEFINED
    out->push_back(done);
  }
  // Requests are dropped from the last on, so that one that moves into a gap need not be removed itself.
  std::sort(indices_.begin(), indices_.begin() + count);
  for (int i = count; i-- > 0;) drop(static_cast<std::size_t>(indices_[i]));
  // They are sorted by step, whatever MPI's order, so that runs are alike.
  std::sort(out->begin() + static_cast<std::ptrdiff_t>(first), out->end(),
            [](const Done& a, const Done& b) { return a.owner.step < b.owner.step; });
}

void Requests::cancel(const void* execution) {
  for (std::size_t i = 0; i < owners_.size(); ++i)
    if (owners_[i].execution == execution && owners_[i].receives)
      mpi_.cancel(handles_.data() + i * mpi_.request_bytes);
}

void Requests::abandon(const void* execution) {
  for (std::size_t i = owners_.size(); i-- > 0;) {
    if (owners_[i].execution != execution) continue;
    if (owners_[i].receives) mpi_.cancel(handles_.data() + i * mpi_.request_bytes);
    drop(i);
  }
}

void Requests::drop(std::size_t i) {
  const std::size_t last = owners_.size() - 1, size = mpi_.request_bytes;
  if (i != last) {
    std::memcpy(handles_.data() + i * size, handles_.data() + last * size, size);
    owners_[i] = owners_[last];
  }
  owners_.pop_back();
}

}  // namespace hybridcomp::engine
