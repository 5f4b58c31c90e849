// Deferral of the signals that arrive while the engine works; hybridcomp/collectives/failure/signals.py says
// why. In compiled code, since every operation enters it.
#include <nanobind/stl/vector.h>

#include <exception>
#include <utility>
#include <vector>

#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

class Deferral {
 public:
  // `main`: the thread that runs handlers. `get` and `set` are those of Python's module _signal, `came` is a
  // deque for signals and their frames.
  Deferral(unsigned long main, const std::vector<int>& signals, nb::object get, nb::object set,
           nb::object came)
      : came(std::move(came)), get_(std::move(get)), set_(std::move(set)), main_(main) {
    for (const int number : signals) signals_.push_back({nb::int_(number), nb::none()});
    own_ = nb::cpp_function([kept = this->came](nb::object number, nb::object frame) {
      kept.attr("append")(nb::make_tuple(number, frame));
    });
  }
  Deferral(const Deferral&) = delete;
  Deferral& operator=(const Deferral&) = delete;

  void enter() {
    if (elsewhere()) return;
    if (!depth_) replace();
    ++depth_;
  }

  void leave() {
    if (elsewhere() || --depth_) return;
    restore();
    call();
  }

  void answer() {
    if (elsewhere()) return;
    restore();
    try {
      call();
    } catch (...) {
      replace();
      throw;
    }
    replace();
  }

  const nb::object came;

 private:
  struct Signal {
    nb::object number, handler;  // the handler that was in place when it was last replaced
  };

  bool elsewhere() const { return PyThread_get_thread_ident() != main_; }

  void call() {
    while (PyObject_Size(came.ptr()) > 0) {
      const nb::tuple one = nb::cast<nb::tuple>(came.attr("popleft")());
      for (const Signal& signal : signals_)
        if (signal.number.equal(one[0])) {
          const nb::object handler = signal.handler;
          handler(one[0], one[1]);
          break;
        }
    }
  }

  void replace() {
    try {
      for (std::size_t i = 0; i < signals_.size(); ++i) {
        Signal& signal = signals_[i];
        nb::object handler = get_(signal.number);
        // Handlers that are not Python's are numbers, or None.
        if (PyLong_CheckExact(handler.ptr()) || handler.is_none() || handler.is(own_)) continue;
        replaced_.push_back(i);
        signal.handler = std::move(handler);
        set_(signal.number, own_);
      }
    } catch (...) {  // a handler not yet replaced has raised
      restore();
      throw;
    }
  }

  void restore() {
    std::exception_ptr raised;
    while (!replaced_.empty()) {
      const Signal& signal = signals_[replaced_.back()];
      try {
        // And not another handler that the program has set meanwhile.
        if (get_(signal.number).is(own_)) set_(signal.number, signal.handler);
        replaced_.pop_back();
      } catch (nb::python_error&) {  // of a handler that is back in its place
        raised = std::current_exception();
      }
    }
    if (raised) std::rethrow_exception(raised);
  }

  nb::object get_, set_, own_;
  std::vector<Signal> signals_;
  std::vector<std::size_t> replaced_;
  const unsigned long main_;  // a forked process does not use MPI
  long depth_ = 0;
};

}  // namespace

void bind_deferral(nb::module_& m) {
  nb::class_<Deferral>(m, "Deferral")
      .def(nb::init<unsigned long, const std::vector<int>&, nb::object, nb::object, nb::object>(), "main"_a,
           "signals"_a, "get"_a, "set"_a, "came"_a)
      .def_ro("came", &Deferral::came, "Signals that have come and are not answered, with their frames.")
      .def("__enter__", &Deferral::enter)
      .def(
          "__exit__", [](Deferral& self, nb::handle, nb::handle, nb::handle) { self.leave(); },
          nb::arg().none(), nb::arg().none(), nb::arg().none())
      .def("answer", &Deferral::answer,
           "Call the handlers of the signals that have come, in the main thread and where its work can be "
           "left.");
}

}  // namespace hybridcomp
