#include "engine/contacts.hpp"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

namespace hybridcomp::engine {
namespace {

constexpr int kMostThreads = 64;  // threads that may be left behind
constexpr auto kIdle = std::chrono::seconds(1);

// Whether two jobs are messages of one operation to one rank.
bool alike(const Contacts::Job& a, const Contacts::Job& b) {
  return a.owner.execution == b.owner.execution && a.comm == b.comm && a.peer == b.peer;
}

}  // namespace

void Contacts::post(const Job& job) {
  ++waiting_;
  const std::lock_guard lock(shared_->mutex);
  if (shared_->refuse(job)) return;
  shared_->jobs.push_back(job);
  start_threads();
  shared_->wake.notify_one();
}

// Start a thread if jobs need one; called under the lock of Shared. A free thread takes a job; busy ones may
// never come back.
void Contacts::start_threads() {
  if (shared_->free >= static_cast<int>(shared_->jobs.size()) || shared_->threads >= kMostThreads) return;
  try {
    std::thread([shared = shared_] { run(shared); }).detach();
    ++shared_->threads;
  } catch (const std::system_error&) {  // no more threads: take() tries again
  }
}

std::vector<Contacts::Job> Contacts::take() {
  std::vector<Job> jobs;
  {
    const std::lock_guard lock(shared_->mutex);
    jobs.assign(shared_->posted.begin(), shared_->posted.end());
    shared_->posted.clear();
    if (!shared_->threads && !shared_->jobs.empty()) start_threads();
  }
  waiting_ -= jobs.size();
  std::erase_if(jobs, [this](const Job& job) {
    const auto found = std::find(forgotten_.begin(), forgotten_.end(), job.owner.execution);
    return found != forgotten_.end();
  });
  return jobs;
}

void Contacts::forget(const void* execution) {
  if (waiting_) forgotten_.push_back(execution);
}

std::deque<Contacts::Job>::iterator Contacts::Shared::next() {
  return std::find_if(jobs.begin(), jobs.end(), [this](const Job& job) {
    return std::find(busy.begin(), busy.end(), std::pair(job.comm, job.peer)) == busy.end();
  });
}

void Contacts::Shared::refuse_behind(const Job& refused) {
  std::erase_if(jobs, [&](Job& job) {
    if (!alike(job, refused)) return false;
    job.code = refused.code;
    posted.push_back(job);
    return true;
  });
}

bool Contacts::Shared::refuse(const Job& job) {
  const auto refused = std::find_if(posted.begin(), posted.end(),
                                    [&](const Job& other) { return other.code && alike(other, job); });
  if (refused == posted.end()) return false;
  Job behind = job;
  behind.code = refused->code;
  posted.push_back(behind);
  return true;
}

void Contacts::run(const std::shared_ptr<Shared>& shared) {
  std::unique_lock lock(shared->mutex);
  while (true) {
    ++shared->free;
    const bool found =
        shared->wake.wait_for(lock, kIdle, [&] { return shared->next() != shared->jobs.end(); });
    --shared->free;
    if (!found) break;
    const auto at = shared->next();
    Job job = *at;
    shared->jobs.erase(at);
    shared->busy.emplace_back(job.comm, job.peer);
    lock.unlock();
    job.code =
        shared->mpi.isend(job.data, job.bytes, shared->mpi.byte, job.peer, job.tag, job.comm, &job.request);
    lock.lock();
    std::erase(shared->busy, std::pair(job.comm, job.peer));
    shared->posted.push_back(job);
    if (job.code) shared->refuse_behind(job);
    shared->wake.notify_one();
  }
  --shared->threads;
}

}  // namespace hybridcomp::engine
