#include "codecs/common/status.hpp"

namespace hybridcomp {

const char* status_text(int code) {
  switch (code) {
    case kOk:
      return "no error";
    case kBadLength:
      return "the payload's length does not fit its counts";
    case kBadBlock:
      return "the block size is not a multiple of 8 from 8 to 65536 (a power of two up to 2048 with a "
             "Hadamard transform), or reserved bits are set";
    case kBadIndexCount:
      return "the blocks' counts do not add up to the number of values";
    case kBadIndexOrder:
      return "indices are not strictly ascending";
    case kBadIndexRange:
      return "an index lies past the end of its block";
    case kBadBitmap:
      return "a bitmap has another number of bits set than its block's count";
    case kOtherValues:
      return "the values are not plain elements of the output's type";
    case kOtherCodec:
      return "the codec is not decoded here";
    case kBadZfpBits:
      return "the bits per block are out of range for the dtype, or reserved bits are set";
    case kBadLag:
      return "the lag is not from 1 to 32, or reserved bits are set";
    case kBadZeros:
      return "a chunk is not as long as its bitmap says";
    case kBadExponentCode:
      return "a block has a code that its type or its length does not allow";
    case kBadEscapes:
      return "a block has another number of escapes than its code says";
    case kBadFormat:
      return "the number format is not one of the codec's";
    case kBadMxBlock:
      return "the block of a microscaling format is not of 32 elements";
    case kBadBound:
      return "the error bound is not a number of at least 0";
    case kBadBoundedBlock:
      return "the block size is not 64";
    case kBadBoundedCode:
      return "a block has an unknown code";
    case kBadCoder:
      return "there is no such coder, or its rows or chunks are of another size than it allows";
    case kBadWindow:
      return "a row refers to more distinct rows back than there are";
    case kBadCodeLengths:
      return "the lengths of a Huffman code make no complete code of up to 12 bits";
    case kBadLattice:
      return "the integers' width or the number of contributions is out of range";
    case kBadScale:
      return "the scale is negative, infinite or not a float";
    default:
      return "unknown status";
  }
}

}  // namespace hybridcomp
