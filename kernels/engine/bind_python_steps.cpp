// Python's side of python_steps.cpp: hybridcomp/collectives/execution/python_steps.py computes the steps.
#include <optional>

#include "objects.hpp"

namespace hybridcomp::engine {
namespace {

nb::object view(std::span<std::uint8_t> bytes, int access) {
  if (bytes.empty()) return nb::none();
  PyObject* const made = PyMemoryView_FromMemory(reinterpret_cast<char*>(bytes.data()),
                                                 static_cast<Py_ssize_t>(bytes.size()), access);
  if (!made) throw nb::python_error();
  return nb::steal(made);
}

// The next step, or None: its index, room for its message, the scratch memory, and the messages that it
// reads. The views are of the engine's memory, to be released before the answer.
nb::object take(const Run& run) {
  std::optional<Asked> asked;
  {
    nb::gil_scoped_release release;
    asked = the_engine()->take(*run);
  }
  if (!asked) return nb::none();
  nb::list messages;
  for (const auto& message : asked->messages) messages.append(view(message, PyBUF_READ));
  return nb::make_tuple(asked->step, view(asked->room, PyBUF_WRITE), view(asked->scratch, PyBUF_WRITE),
                        messages);
}

void answer(const Run& run, std::uint32_t step, std::size_t bytes, double seconds) {
  const Program& program = run->program();
  if (step >= program.steps.size()) Buffer::fail("there is no such step");
  const Step& made = program.steps[step];
  const bool fills = made.kind == kEncode || made.kind == kSumEncode;
  if (fills && (bytes < sizeof(Header) || bytes > program.slots[made.slot].bytes))
    Buffer::fail("a message of " + std::to_string(bytes) + " bytes, which cannot be");
  nb::gil_scoped_release release;
  the_engine()->answer(*run, step, bytes, seconds);
}

// The same program with the codec of another step: of the same kind and bounds.
ProgramHandle with_codec(const ProgramHandle& handle, const Encoder* encoder, std::uint32_t params) {
  const Program& program = *handle.program;
  if (params == program.carriage.params) return handle;
  if ((encoder == nullptr) != !program.carriage.encoder) Buffer::fail("a codec of another kind");
  auto changed = std::make_shared<Program>(program);
  changed->carriage.params = params;
  if (encoder) changed->carriage.encoder = *encoder;
  for (const Slot& slot : changed->slots)
    if (encoder && !slot.plain && encoder->bound(slot.count, slot.dtype) > slot.bytes)
      Buffer::fail("messages of the codec's steps have different bounds");
  return {std::move(changed), handle.group};
}

}  // namespace

void bind_python_steps(nb::module_& m) {
  using namespace nb::literals;
  m.def("engine_take", &take, "run"_a);
  m.def("engine_answer", &answer, "run"_a, "step"_a, "bytes"_a, "seconds"_a);
  m.def("engine_with_codec", &with_codec, "program"_a, "encoder"_a.none(), "params"_a);
}

}  // namespace hybridcomp::engine
