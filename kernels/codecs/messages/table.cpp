#include "codecs/messages/table.hpp"

#include <array>

namespace hybridcomp {

extern const CodecEntry kNoneCodec, kFp16Codec, kBf16Codec, kInt8Codec, kInt4Codec, kInt2Codec, kSignCodec,
    kFp8Codec, kMxfp8Codec, kMxfp4Codec, kZfpCodec, kBoundedCodec, kMpcCodec, kExponentCodec, kTopkCodec,
    kThresholdCodec, kSidcoCodec, kLatticeCodec;

namespace {

constexpr const CodecEntry* kCodecs[] = {
    &kNoneCodec, &kFp16Codec,     &kBf16Codec,  &kInt8Codec,      &kInt4Codec,  &kInt2Codec,
    &kSignCodec, &kFp8Codec,      &kMxfp8Codec, &kMxfp4Codec,     &kZfpCodec,   &kBoundedCodec,
    &kMpcCodec,  &kExponentCodec, &kTopkCodec,  &kThresholdCodec, &kSidcoCodec, &kLatticeCodec};

}  // namespace

const CodecEntry* find_codec(std::uint8_t id) {
  static const auto by_id = [] {
    std::array<const CodecEntry*, 256> all{};
    for (const CodecEntry* codec : kCodecs) all[codec->id] = codec;
    return all;
  }();
  return by_id[id];
}

int check_payload_head(std::uint8_t codec, const std::uint8_t* head, std::size_t bytes, DTypeCode dtype,
                       std::size_t n) {
  const CodecEntry* const entry = find_codec(codec);
  return entry && entry->check_head ? entry->check_head(head, bytes, dtype, n) : kOtherCodec;
}

int check_payload(std::uint8_t codec, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                  std::size_t n) {
  const CodecEntry* const entry = find_codec(codec);
  return entry && entry->check ? entry->check(payload, bytes, dtype, n)
                               : check_payload_head(codec, payload, bytes, dtype, n);
}

int decode_payload(const Kernels& k, std::uint8_t codec, const std::uint8_t* payload, std::size_t bytes,
                   DTypeCode dtype, std::size_t n, int threads, std::uint8_t* out, DTypeCode out_dtype,
                   bool add) {
  const CodecEntry* const entry = find_codec(codec);
  return entry ? entry->decode(k, payload, bytes, dtype, n, threads, out, out_dtype, add) : kOtherCodec;
}

bool open_parts(std::uint8_t codec, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                std::size_t n, Parts* parts) {
  const CodecEntry* const entry = find_codec(codec);
  return entry && entry->open && entry->open(payload, bytes, dtype, n, parts);
}

}  // namespace hybridcomp
