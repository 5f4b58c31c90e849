// Messages of any codec: headers, CRCs, and whole encodes and decodes in one call from Python.
#include "codecs/messages/opening.hpp"
#include "codecs/messages/table.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

// -- headers -----------------------------------------------------------------------------------------------

std::uint32_t message_crc(nb::handle message) {
  const Buffer buffer(message, false);
  if (buffer.bytes() < sizeof(Header)) Buffer::fail("message is shorter than a header");
  nb::gil_scoped_release release;
  return crc_of(buffer.data(), buffer.bytes() - sizeof(Header));
}

nb::object open_message(nb::handle message) {
  const Buffer buffer(message, false);
  Header h;
  if (!read_header(buffer.data(), buffer.bytes(), &h)) return nb::none();
  bool whole;
  {
    nb::gil_scoped_release release;
    whole = crc_of(buffer.data(), h.payload) == h.crc;
  }
  if (!whole) return nb::none();
  return nb::make_tuple(h.codec, h.dtype, h.count, h.payload, h.params);
}

// -- payloads ----------------------------------------------------------------------------------------------

// Return the type of a codec's elements: floats, or any type if it is exact.
DTypeCode dtype_for(std::uint8_t codec, int code) {
  const CodecEntry* const entry = find_codec(codec);
  const bool exact = entry && entry->exact && code > kBFloat16 && code <= kLastDType;
  return exact ? static_cast<DTypeCode>(code) : float_dtype(code);
}

std::size_t checked_count(std::size_t n) {
  if (n > kMostElements) Buffer::fail("n is more than a message holds");
  return n;
}

// Check the first bytes of a payload of so many bytes; bytes that are not given are taken for zeros.
int check_head(std::uint8_t codec, const nb::bytes& head, std::size_t bytes, std::size_t n, int dtype) {
  std::uint8_t first[kHeadBytes] = {};
  std::memcpy(first, head.c_str(), std::min(head.size(), sizeof(first)));
  return check_payload_head(codec, first, bytes, dtype_for(codec, dtype), checked_count(n));
}

int check(std::uint8_t codec, nb::handle payload, std::size_t n, int dtype) {
  const DTypeCode type = dtype_for(codec, dtype);
  const Buffer from(payload, false);
  checked_count(n);
  nb::gil_scoped_release release;
  return check_payload(codec, from.data(), from.bytes(), type, n);
}

int decode_into(std::uint8_t codec, nb::handle payload, std::size_t n, int dtype, nb::handle out,
                int out_dtype, bool add) {
  const DTypeCode type = dtype_for(codec, dtype);
  if (!is_float(type) && (add || dtype != out_dtype)) Buffer::fail("what is no float is decoded as it is");
  const DTypeCode out_type = !is_float(type) ? type : add ? sum_dtype(out_dtype) : float_dtype(out_dtype);
  if (add && (type == kFloat64) != (out_type == kFloat64))
    Buffer::fail("doubles, and only they, add to doubles");
  const Buffer from(payload, false), to(out, true);
  if (to.elements(element_bytes(out_type), "out") != checked_count(n))
    Buffer::fail("out must have n elements");
  nb::gil_scoped_release release;
  return decode_payload(kernels(), codec, from.data(), from.bytes(), type, n, thread_count(), to.data(),
                        out_type, add);
}

// -- the usual arrays --------------------------------------------------------------------------------------

// A one-dimensional contiguous NumPy array of bytes, float32, float64 or float16, as nearly all arrays are;
// this is found out without asking Python.
class Plain {
 public:
  static constexpr int kBytes = 0;  // code of bytes, in place of a DTypeCode

  Plain(nb::handle x, bool writable) {
    const Numpy& numpy = Numpy::get();
    if (Py_TYPE(x.ptr()) != numpy.array) return;
    PyObject* const dtype = PyObject_GetAttr(x.ptr(), numpy.dtype);
    Py_XDECREF(dtype);  // the array holds it
    while (code_ < Numpy::kTypes && numpy.types[code_] != dtype) ++code_;
    if (code_ == Numpy::kTypes) {
      PyErr_Clear();
      return;
    }
    held_ = PyObject_GetBuffer(x.ptr(), &view_, writable ? PyBUF_ND | PyBUF_WRITABLE : PyBUF_ND) == 0;
    if (!held_) PyErr_Clear();  // not contiguous, or read-only
  }
  ~Plain() {
    if (held_) PyBuffer_Release(&view_);
  }
  Plain(const Plain&) = delete;
  Plain& operator=(const Plain&) = delete;

  explicit operator bool() const { return held_ && view_.ndim == 1; }
  bool is_bytes() const { return code_ == kBytes; }
  DTypeCode dtype() const { return static_cast<DTypeCode>(code_); }
  std::uint8_t* data() const { return static_cast<std::uint8_t*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.shape[0]); }

 private:
  struct Numpy {
    static constexpr int kTypes = 4;
    PyTypeObject* array;
    PyObject* dtype;          // the attribute's name
    PyObject* types[kTypes];  // NumPy's dtype objects, by code

    static const Numpy& get() {
      static const Numpy& numpy = *new Numpy;  // kept until the process ends
      return numpy;
    }

    Numpy() {
      const nb::module_ module = nb::module_::import_("numpy");
      array = reinterpret_cast<PyTypeObject*>(module.attr("ndarray").inc_ref().ptr());
      dtype = PyUnicode_InternFromString("dtype");
      constexpr const char* kNames[kTypes] = {"uint8", "float32", "float64", "float16"};
      for (int i = 0; i < kTypes; ++i) types[i] = module.attr("dtype")(kNames[i]).release().ptr();
    }
  };
  static_assert(kFloat32 == 1 && kFloat64 == 2 && kFloat16 == 3);

  Py_buffer view_;
  int code_ = 0;
  bool held_ = false;
};

// Decode a message into plain arrays; returns false if they are not plain, if the message is faulty or is
// decoded elsewhere: then `out` may hold anything.
bool decode_plain(nb::handle message, nb::handle out, bool add) {
  const Plain from(message, false);
  if (!from || !from.is_bytes()) return false;
  const Plain to(out, true);
  Header h;
  if (!to || to.is_bytes() || !read_header(from.data(), from.size(), &h)) return false;
  if (h.dtype > kBFloat16 || h.count != to.size()) return false;
  const DTypeCode dtype = static_cast<DTypeCode>(h.dtype);
  if (add && to.dtype() != (dtype == kFloat64 ? kFloat64 : kFloat32)) return false;
  nb::gil_scoped_release release;
  if (crc_of(from.data(), h.payload) != h.crc) return false;
  return decode_payload(kernels(), h.codec, from.data() + sizeof(h), h.payload, dtype, h.count,
                        thread_count(), to.data(), to.dtype(), add) == kOk;
}

// Encode a plain array into a plain array of bytes; returns 0 if they are not plain, there is not room, or
// the codec does not take the type.
std::size_t encode_plain(const Encoder& encoder, nb::handle x, nb::handle out) {
  const Plain from(x, false);
  if (!from || from.is_bytes()) return 0;
  const Plain to(out, true);
  if (!to || !to.is_bytes()) return 0;
  nb::gil_scoped_release release;
  const std::size_t need = encoder.bound(from.size(), from.dtype());
  if (!need || to.size() < need) return 0;
  return encoder.write(kernels(), from.data(), from.dtype(), from.size(), thread_count(), to.data());
}

// Make the encoder of a codec with these parameters.
Encoder make_encoder(std::uint8_t codec, std::uint32_t params, const nb::kwargs& given) {
  const CodecEntry* const entry = find_codec(codec);
  if (!entry) Buffer::fail("no codec of the kernels has the id " + std::to_string(codec));
  Parameters parameters;
  for (const auto& [key, value] : given) {
    const auto name = nb::cast<std::string>(key);
    std::uint64_t whole = 0;
    if (nb::isinstance<nb::bool_>(value))
      parameters.set(name, nb::cast<bool>(value));
    else if (nb::isinstance<nb::str>(value))
      parameters.set(name, nb::cast<std::string>(value));
    else if (nb::isinstance<nb::float_>(value))
      parameters.set(name, nb::cast<double>(value));
    else if (nb::try_cast(value, whole))
      parameters.set(name, whole);
    else
      Buffer::fail(name + " is not a parameter of a codec");
  }
  return entry->encoder({codec, params}, parameters);
}

std::size_t bound(const Encoder& encoder, std::size_t n, int dtype) {
  return encoder.bound(checked_count(n), dtype_for(encoder.identity.id.codec, dtype));
}

std::size_t encode(const Encoder& encoder, nb::handle src, int dtype, nb::handle out) {
  const DTypeCode type = dtype_for(encoder.identity.id.codec, dtype);
  const Buffer from(src, false), to(out, true);
  const std::size_t n = from.elements(element_bytes(type), "src");
  const std::size_t need = encoder.bound(n, type);
  if (!need) Buffer::fail("the codec does not take this dtype");
  if (to.bytes() < need) Buffer::fail("out is too small");
  nb::gil_scoped_release release;
  return encoder.write(kernels(), from.data(), type, n, thread_count(), to.data());
}

nb::tuple identity(const Encoder& encoder) {
  const CodecIdentity& codec = encoder.identity;
  return nb::make_tuple(codec.id.codec, codec.id.params, codec.bits, codec.block, codec.sparse);
}

}  // namespace

void bind_message(nb::module_& m) {
  m.def("message_crc", &message_crc, "message"_a);
  m.def("open_message", &open_message, "message"_a,
        "The header's codec, dtype, count, payload and params; None if it, or the CRC, is wrong.");
  m.def("check_head", &check_head, "codec"_a, "head"_a, "bytes"_a, "n"_a, "dtype"_a, "Returns a Status.");
  m.def("check_payload", &check, "codec"_a, "payload"_a, "n"_a, "dtype"_a, "Returns a Status.");
  m.def("decode_payload", &decode_into, "codec"_a, "payload"_a, "n"_a, "dtype"_a, "out"_a, "out_dtype"_a,
        "add"_a, "Returns a Status.");
  m.def("decode_plain", &decode_plain, "message"_a.none(), "out"_a.none(), "add"_a,
        "Whether the message could be decoded by this one call.");
  m.def("encoder", &make_encoder, "codec"_a, "params"_a, "given"_a);
  nb::class_<Encoder>(m, "Encoder", "A codec with its parameters.")
      .def_prop_ro("identity", &identity, "Wire id, hash of the spec, bits and block of integers, sparse.")
      .def("bound", &bound, "n"_a, "dtype"_a, "The most bytes of a message; 0: not of this dtype.")
      .def("encode_plain", &encode_plain, "x"_a.none(), "out"_a.none(), "Returns the message's bytes, or 0.")
      .def("encode", &encode, "src"_a, "dtype"_a, "out"_a, "Returns the message's bytes.");
}

}  // namespace hybridcomp
