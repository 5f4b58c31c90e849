// libFuzzer around hybridcomp.decode: an embedded Python runs tests/fuzz/target.py on every input, on kernels
// built with AddressSanitizer, UndefinedBehaviorSanitizer and coverage (HYBRIDCOMP_FUZZ_KERNELS names them).
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace {

PyObject* one_input = nullptr;

[[noreturn]] void fail() {
  PyErr_Print();
  std::abort();  // libFuzzer writes the input to a file
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  Py_InitializeEx(0);
  PyObject* module = PyImport_ImportModule("tests.fuzz.driven");
  if (!module) fail();
  one_input = PyObject_GetAttrString(module, "one_input");
  if (!one_input) fail();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  PyObject* result = PyObject_CallFunction(one_input, "y#", reinterpret_cast<const char*>(data),
                                           static_cast<Py_ssize_t>(size));
  if (!result) fail();
  Py_DECREF(result);
  return 0;
}
