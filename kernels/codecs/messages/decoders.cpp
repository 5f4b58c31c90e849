#include "codecs/messages/decoders.hpp"

#include "codecs/block/message.hpp"
#include "codecs/bounded/bounded.hpp"
#include "codecs/convert/convert.hpp"
#include "codecs/lattice/message.hpp"
#include "codecs/lossless/exponent.hpp"
#include "codecs/lossless/mpc.hpp"
#include "codecs/minifloat/minifloat.hpp"
#include "codecs/sign/sign.hpp"
#include "codecs/sparse/message.hpp"
#include "codecs/zfp/zfp.hpp"

namespace hybridcomp {
namespace {

struct Cast {
  bool is;
  DTypeCode stored;
};

// Codecs whose payload is the elements in some type.
Cast cast_of(std::uint8_t codec, DTypeCode dtype) {
  if (codec == kNoneId) return {true, dtype};
  return {codec == kFp16Id || codec == kBf16Id, codec == kFp16Id ? kFloat16 : kBFloat16};
}

int check_cast(std::size_t bytes, DTypeCode stored, std::size_t n) {
  return bytes % size_of(stored) == 0 && bytes / size_of(stored) == n ? kOk : kBadLength;
}

int check_lattice(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n) {
  LatticePrefix prefix;
  return lattice_check(payload, bytes, dtype, n, &prefix);
}

int decode_lattice(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                   std::size_t n, int threads, std::uint8_t* out, DTypeCode out_dtype, bool add) {
  LatticePrefix prefix;
  const int status = lattice_check(payload, bytes, dtype, n, &prefix);
  if (status == kOk)
    lattice_dequantize(k, payload + sizeof(prefix), dtype, n, static_cast<int>(prefix.bits), prefix.scale,
                       threads, out, out_dtype, add);
  return status;
}

int block_bits(std::uint8_t codec) { return codec == kInt8Id ? 8 : codec == kInt4Id ? 4 : 2; }

}  // namespace

int check_payload(std::uint8_t codec, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                  std::size_t n) {
  if (const Cast cast = cast_of(codec, dtype); cast.is) return check_cast(bytes, cast.stored, n);
  switch (codec) {
    case kInt8Id:
    case kInt4Id:
    case kInt2Id:
      return check_quantized(payload, bytes, dtype, n, block_bits(codec));
    case kSignId:
      return check_sign(payload, bytes, dtype, n);
    case kFp8Id:
      return check_minifloat(payload, bytes, n, 8, false);
    case kMxfp8Id:
    case kMxfp4Id:
      return check_minifloat(payload, bytes, n, codec == kMxfp8Id ? 8 : 4, true);
    case kZfpId:
      return zfp_check(payload, bytes, dtype, n);
    case kBoundedId:
      return check_bounded(payload, bytes, dtype, n);
    case kExponentId:
      return check_exponent(payload, bytes, dtype, n);
    case kMpcId:
      return check_mpc(payload, bytes, n * size_of(dtype), static_cast<int>(size_of(dtype)));
    case kLatticeId:
      return check_lattice(payload, bytes, dtype, n);
    default:
      return kOtherCodec;
  }
}

int decode_payload(const Kernels& k, std::uint8_t codec, const std::uint8_t* payload, std::size_t bytes,
                   DTypeCode dtype, std::size_t n, int threads, std::uint8_t* out, DTypeCode out_dtype,
                   bool add) {
  if (const Cast cast = cast_of(codec, dtype); cast.is) {
    const int status = check_cast(bytes, cast.stored, n);
    if (status == kOk) convert_all(k, payload, cast.stored, n, threads, out, out_dtype, add);
    return status;
  }
  switch (codec) {
    case kInt8Id:
    case kInt4Id:
    case kInt2Id:
      return dequantize_payload(k, payload, bytes, dtype, n, block_bits(codec), threads, out, out_dtype, add);
    case kSignId:
      return decode_sign(k, payload, bytes, dtype, n, threads, out, out_dtype, add);
    case kFp8Id:
      return decode_minifloat(k, payload, bytes, n, 8, false, threads, out, out_dtype, add);
    case kMxfp8Id:
    case kMxfp4Id:
      return decode_minifloat(k, payload, bytes, n, codec == kMxfp8Id ? 8 : 4, true, threads, out, out_dtype,
                              add);
    case kZfpId:
      return zfp_decode_payload(k, payload, bytes, dtype, n, threads, out, out_dtype, add);
    case kBoundedId:
      return decode_bounded(k, payload, bytes, dtype, n, threads, out, out_dtype, add);
    case kExponentId:
      return decode_exponent(k, payload, bytes, dtype, n, threads, out, out_dtype, add);
    case kMpcId:
      return mpc_values(k, payload, bytes, n * size_of(dtype), static_cast<int>(size_of(dtype)), threads,
                        {out, dtype, out_dtype, add || dtype != out_dtype, add});
    case kTopkId:
    case kThresholdId:
    case kSidcoId:
      if (dtype != out_dtype) return kOtherValues;
      return read_sparse_payload(k, payload, bytes, n, dtype, out, add, threads);
    case kLatticeId:
      return decode_lattice(k, payload, bytes, dtype, n, threads, out, out_dtype, add);
    default:
      return kOtherCodec;
  }
}

}  // namespace hybridcomp
