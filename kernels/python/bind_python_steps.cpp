// Python's side of python_steps.cpp: hybridcomp/collectives/engine/python_steps.py computes the steps.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

#include "python/objects.hpp"

namespace hybridcomp::engine {
namespace {

nb::object array(std::span<std::uint8_t> bytes, bool writable, const std::shared_ptr<Pin>& pin) {
  const nb::capsule owner(new std::shared_ptr<Pin>(pin),
                          [](void* p) noexcept { delete static_cast<std::shared_ptr<Pin>*>(p); });
  const std::size_t count = bytes.size();
  if (writable) return nb::cast(nb::ndarray<nb::numpy, std::uint8_t>(bytes.data(), 1, &count, owner));
  return nb::cast(nb::ndarray<nb::numpy, const std::uint8_t>(bytes.data(), 1, &count, owner));
}

// Return the next step, or None: its index, room for its message, the scratch memory, and each message that
// it reads. The arrays are views of the engine's memory.
nb::object take(const Run& run) {
  std::optional<Asked> asked;
  {
    nb::gil_scoped_release release;
    asked = the_engine()->take(*run);
  }
  if (!asked) return nb::none();
  nb::list found;
  found.append(asked->step);
  found.append(array(asked->room, true, asked->pin));
  found.append(array(asked->scratch, true, asked->pin));
  for (const auto& message : asked->messages) found.append(array(message, false, asked->pin));
  return found;
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

// Return the same program with the codec of another step; `bounds` as in engine_program.
ProgramHandle with_codec(const ProgramHandle& handle, const Encoder* encoder, int codec, std::uint32_t params,
                         const std::optional<std::vector<std::size_t>>& bounds) {
  const Program& program = *handle.program;
  Carriage carriage = program.carriage;
  if (codec == carriage.codec && params == carriage.params) return handle;
  if (codec < 0 || codec > 255) Buffer::fail("a codec's id fits a byte");
  if (!encoder == carriage.encoder.has_value() || bounds.has_value() != carriage.bounds.has_value())
    Buffer::fail("the codec has no encoder at this step, or one at this step alone");
  carriage.codec = static_cast<std::uint8_t>(codec);
  carriage.params = params;
  carriage.bounds = bounds;
  if (encoder) carriage.encoder = *encoder;
  auto changed = std::make_shared<Program>(program);
  const std::string fault = changed->recode(carriage);
  if (!fault.empty()) Buffer::fail("schedule: " + fault);
  return {std::move(changed), handle.group};
}

}  // namespace

void bind_python_steps(nb::module_& m) {
  using namespace nb::literals;
  m.def("engine_take", &take, "run"_a);
  m.def("engine_answer", &answer, "run"_a, "step"_a, "bytes"_a, "seconds"_a);
  m.def("engine_with_codec", &with_codec, "program"_a, "encoder"_a.none(), "codec"_a, "params"_a,
        "bounds"_a.none());
}

}  // namespace hybridcomp::engine
