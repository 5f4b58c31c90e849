// Pool of memory that is used again: fresh pages of a large array cost more than encoding it. A state is
// replaced by exchanging its room with one of the pool, so there are few for each size in use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace hybridcomp {

// Memory of a fixed size, aligned to a cache line.
class Room {
 public:
  Room(std::size_t bytes, bool zeros);  // without `zeros` it may hold anything; throws std::bad_alloc
  ~Room();
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  std::uint8_t* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void* base_;
  std::uint8_t* data_;
  std::size_t bytes_;
};

using RoomPointer = std::shared_ptr<Room>;

// Rooms that are not in use. Any thread may take and give.
class Rooms {
 public:
  RoomPointer take(std::size_t bytes);  // throws std::bad_alloc
  void give(RoomPointer room) noexcept;

 private:
  std::mutex mutex_;
  std::map<std::size_t, std::vector<RoomPointer>> free_;  // by bytes
  std::size_t small_ = 0;                                 // bytes of the small ones
};

// A room taken from the pool until release, or memory that belongs to another owner.
class Lease {
 public:
  Lease() = default;
  Lease(Rooms& rooms, std::size_t bytes) : rooms_(&rooms), room_(rooms.take(bytes)), data_(room_->data()) {}
  explicit Lease(std::uint8_t* others) : data_(others) {}
  ~Lease() { release(); }
  Lease(Lease&& other) noexcept { swap(other); }
  Lease& operator=(Lease&& other) noexcept {
    swap(other);
    return *this;
  }

  std::uint8_t* data() const { return data_; }
  explicit operator bool() const { return data_ != nullptr; }
  bool owned() const { return room_ != nullptr; }

  // Exchange the room with another of the same size; false if this is another owner's memory.
  bool exchange(RoomPointer& other) noexcept {
    if (!room_) return false;
    room_.swap(other);
    data_ = room_->data();
    return true;
  }

  void release() noexcept {
    if (room_) rooms_->give(std::move(room_));
    room_.reset();
    data_ = nullptr;
  }

 private:
  void swap(Lease& other) noexcept {
    std::swap(rooms_, other.rooms_);
    std::swap(room_, other.room_);
    std::swap(data_, other.data_);
  }

  Rooms* rooms_ = nullptr;
  RoomPointer room_;
  std::uint8_t* data_ = nullptr;
};

}  // namespace hybridcomp
