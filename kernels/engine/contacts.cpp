#include "engine/contacts.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

namespace hybridcomp::engine {
namespace {

constexpr int kMostThreads = 64;  // that may be left behind
constexpr auto kIdle = std::chrono::seconds(1);

}  // namespace

void Contacts::post(const Job& job) {
  ++waiting_;
  const std::lock_guard lock(shared_->mutex);
  shared_->jobs.push_back(job);
  // One that is free takes it; those that are busy may never come back.
  if (shared_->free < static_cast<int>(shared_->jobs.size()) && shared_->threads < kMostThreads) {
    ++shared_->threads;
    std::thread([shared = shared_] { run(shared); }).detach();
  }
  shared_->wake.notify_one();
}

std::vector<Contacts::Job> Contacts::take() {
  std::vector<Job> jobs;
  {
    const std::lock_guard lock(shared_->mutex);
    jobs.assign(shared_->posted.begin(), shared_->posted.end());
    shared_->posted.clear();
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
    const bool behind = job.owner.execution == refused.owner.execution && job.comm == refused.comm &&
                        job.peer == refused.peer;
    if (behind) {
      job.code = refused.code;
      posted.push_back(job);
    }
    return behind;
  });
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
