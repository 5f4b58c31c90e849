// Operations that Python has watched, since MPI may not come back from them.
#include <string>

#include "engine/waiting/watchdog.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

// A watched operation. Its name is written out only if it is needed; see Name in
// hybridcomp/collectives/execution/completion.py.
class WatchedOperation : public engine::Watched {
 public:
  WatchedOperation(double until, nb::object what) : Watched(until), what_(std::move(what)) {
    if (PyTuple_CheckExact(what_.ptr()) && PyTuple_GET_SIZE(what_.ptr()) == 5) {
      op_ = text(0);
      axis_ = text(2);
      for (int i : {1, 3, 4}) numbers_[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(what_.ptr(), i));
    } else {
      op_ = PyUnicode_AsUTF8(what_.ptr());
    }
    if (PyErr_Occurred()) throw nb::python_error();
  }

  std::string name() const override {
    if (!axis_) return op_;
    return std::string(op_) + " number " + std::to_string(numbers_[1]) + " on axis '" + axis_ + "', rank " +
           std::to_string(numbers_[3]) + " of " + std::to_string(numbers_[4]);
  }

  void end() { until_.store(0); }

 private:
  const char* text(int i) { return PyUnicode_AsUTF8(PyTuple_GET_ITEM(what_.ptr(), i)); }

  nb::object what_;  // owns the text
  const char *op_ = nullptr, *axis_ = nullptr;
  long long numbers_[5] = {};
};

}  // namespace

void bind_watchdog(nb::module_& m) {
  nb::class_<WatchedOperation>(m, "WatchedOperation")
      .def(nb::init<double, nb::object>(), "until"_a, "what"_a)
      .def("__enter__", [](nb::object self) { return self; })
      .def("__exit__", [](WatchedOperation& self, nb::args) { self.end(); });
  struct Inside {};
  nb::class_<Inside>(m, "InsideMpi")
      .def(nb::init<>())
      .def("__enter__", [](Inside&) { engine::InsideMpi::enter(); })
      .def("__exit__", [](Inside&, nb::args) { engine::InsideMpi::leave(); });
  m.def(
      "watchdog_start",
      [](const std::string& who, double between, int looks) {
        engine::Watchdog::instance().start(who, between, looks);
      },
      "who"_a, "between"_a, "looks"_a);
}

}  // namespace hybridcomp
