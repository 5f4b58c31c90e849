// Parameters of a codec, by their names in a spec string, from which an encoder is made.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <variant>

namespace hybridcomp {

class Parameters {
 public:
  using Value = std::variant<bool, std::uint64_t, double, std::string>;

  void set(const std::string& name, Value value) { values_[name] = std::move(value); }
  bool has(const char* name) const { return values_.contains(name); }

  // Return the value of a name; std::invalid_argument if there is none, or it is of another type.
  bool flag(const char* name) const { return get<bool>(name, "true or false"); }
  const std::string& word(const char* name) const { return get<std::string>(name, "a word"); }
  double number(const char* name) const {  // whole or not
    const auto at = values_.find(name);
    if (at != values_.end())
      if (const auto* whole = std::get_if<std::uint64_t>(&at->second)) return static_cast<double>(*whole);
    return get<double>(name, "a number");
  }

  // Return the value of a name, which must be a whole number from `low` to `high`.
  template <typename T>
  T whole(const char* name, std::uint64_t low, std::uint64_t high) const {
    const std::uint64_t value = get<std::uint64_t>(name, "a whole number");
    if (value < low || value > high)
      refuse(name, "from " + std::to_string(low) + " to " + std::to_string(high));
    return static_cast<T>(value);
  }

  // Throw std::invalid_argument: the value of a name must be `what`.
  [[noreturn]] static void refuse(const char* name, const std::string& what) {
    throw std::invalid_argument(std::string(name) + " must be " + what);
  }

 private:
  template <typename T>
  const T& get(const char* name, const char* what) const {
    const auto at = values_.find(name);
    const T* const value = at == values_.end() ? nullptr : std::get_if<T>(&at->second);
    if (!value) refuse(name, what);
    return *value;
  }

  std::map<std::string, Value, std::less<>> values_;
};

}  // namespace hybridcomp
