// The sparse codecs whose values go as they are: their encoders, and their entries of the table.
#include "codecs/messages/codec_entry.hpp"
#include "codecs/sparse/message.hpp"
#include "codecs/sparse/select.hpp"

namespace hybridcomp {
namespace {

// Make the encoder of a sparse codec. `most(n)`: the most elements of n that are sent. `select(kernels, src,
// dtype, n, threads)` selects them. "plain" is the hash of the spec of `none`.
template <typename Most, typename Select>
Encoder encoder_of(CodecId id, const Parameters& parameters, Most most, Select select) {
  const auto plain = parameters.whole<std::uint32_t>("plain", 0, ~std::uint32_t(0));
  return {{.id = id, .sparse = true},
          [=](std::size_t n, DTypeCode dtype) { return sparse_message_bound(n, most(n), dtype); },
          [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
              std::uint8_t* out) {
            return write_sparse_message(k, select(k, src, dtype, n, threads), id, plain, out);
          }};
}

// Share of n elements, rounded up: in whole numbers, since 0.07 * 100 is 7.000000000000001 otherwise.
struct Share {
  std::uint64_t numerator, denominator;

  explicit Share(const Parameters& parameters)
      : numerator(parameters.whole<std::uint64_t>("numerator", 0, ~std::uint64_t(0))),
        denominator(parameters.whole<std::uint64_t>("denominator", 1, ~std::uint64_t(0))) {
    if (numerator > denominator) Parameters::refuse("the share", "at most 1");
  }

  std::size_t of(std::size_t n) const {
    __extension__ using Wide = unsigned __int128;
    return static_cast<std::size_t>((Wide(n) * numerator + denominator - 1) / denominator);
  }
};

Encoder make_topk(CodecId id, const Parameters& parameters) {
  const Share share(parameters);
  return encoder_of(
      id, parameters, [=](std::size_t n) { return share.of(n); },
      [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads) {
        return select_largest(k, src, dtype, n, share.of(n), true, threads);
      });
}

Encoder make_threshold(CodecId id, const Parameters& parameters) {
  const bool relative = !parameters.has("abs");
  const char* const name = relative ? "rel" : "abs";
  const double limit = parameters.number(name);
  if (!(limit >= 0)) Parameters::refuse(name, "a number that is not negative");
  return encoder_of(
      id, parameters, [](std::size_t n) { return n; },
      [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads) {
        return select_threshold(k, src, dtype, n, limit, relative, threads);
      });
}

Encoder make_sidco(CodecId id, const Parameters& parameters) {
  const Share share(parameters);
  const SidcoFit fits{parameters.whole<int>("stages", 0, kMostStages),
                      static_cast<Distribution>(parameters.whole<std::uint32_t>("distribution", 0, kPareto))};
  return encoder_of(
      id, parameters, [=](std::size_t n) { return sidco_most(n, share.of(n)); },
      [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads) {
        return select_sidco(k, src, dtype, n, share.of(n), fits, threads);
      });
}

int decode(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n,
           int threads, std::uint8_t* out, DTypeCode out_dtype, bool add) {
  if (dtype != out_dtype) return kOtherValues;
  return read_sparse_payload(k, payload, bytes, n, dtype, out, add, threads);
}

// Return a sparse codec's entry, without checks: Python checks its payloads, which may hold messages of any
// codec.
constexpr CodecEntry entry(std::uint8_t id, Encoder (*make)(CodecId, const Parameters&)) {
  return {.id = id, .encoder = make, .decode = decode};
}

}  // namespace

extern const CodecEntry kTopkCodec = entry(kTopkId, make_topk),
                        kThresholdCodec = entry(kThresholdId, make_threshold),
                        kSidcoCodec = entry(kSidcoId, make_sidco);

}  // namespace hybridcomp
