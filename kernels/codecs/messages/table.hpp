// The table of the codecs that C++ encodes and decodes alone, by their wire ids.
#pragma once

#include "codecs/messages/codec_entry.hpp"

namespace hybridcomp {

// Null if the table does not have it.
const CodecEntry* find_codec(std::uint8_t id);

// These look the codec up; kOtherCodec, or false, says that it is decoded elsewhere.

// What the head of a payload tells, as CodecEntry::check_head; of a sparse codec's only kOtherCodec.
int check_payload_head(std::uint8_t codec, const std::uint8_t* head, std::size_t bytes, DTypeCode dtype,
                       std::size_t n);

// Whether a payload's lengths and fields are right: a Status. Of a sparse codec's only kOtherCodec.
int check_payload(std::uint8_t codec, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                  std::size_t n);

// As CodecEntry::decode; of a sparse codec's kOtherValues, too, says that it is decoded elsewhere.
int decode_payload(const Kernels& k, std::uint8_t codec, const std::uint8_t* payload, std::size_t bytes,
                   DTypeCode dtype, std::size_t n, int threads, std::uint8_t* out, DTypeCode out_dtype,
                   bool add);

// As CodecEntry::open.
bool open_parts(std::uint8_t codec, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                std::size_t n, Parts* parts);

}  // namespace hybridcomp
