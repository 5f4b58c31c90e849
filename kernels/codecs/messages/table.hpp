// Table of the codecs that C++ encodes and decodes without Python, by their wire ids.
#pragma once

#include "codecs/messages/codec_entry.hpp"

namespace hybridcomp {

// Return a codec's entry; null if the table does not have it.
const CodecEntry* find_codec(std::uint8_t id);

// The functions below look the codec up; kOtherCodec, or false, tells that it is decoded elsewhere.

// Check the head of a payload, as CodecEntry::check_head; always kOtherCodec for a sparse codec's.
int check_payload_head(std::uint8_t codec, const std::uint8_t* head, std::size_t bytes, DTypeCode dtype,
                       std::size_t n);

// Check a payload's lengths and fields: a Status. Always kOtherCodec for a sparse codec's.
int check_payload(std::uint8_t codec, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                  std::size_t n);

// Decode as CodecEntry::decode does; for a sparse codec's payload kOtherValues, too, tells that it is decoded
// elsewhere.
int decode_payload(const Kernels& k, std::uint8_t codec, const std::uint8_t* payload, std::size_t bytes,
                   DTypeCode dtype, std::size_t n, int threads, std::uint8_t* out, DTypeCode out_dtype,
                   bool add);

// Open a payload as CodecEntry::open does.
bool open_parts(std::uint8_t codec, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                std::size_t n, Parts* parts);

}  // namespace hybridcomp
