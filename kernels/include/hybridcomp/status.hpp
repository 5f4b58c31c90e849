// Faults that a decoder finds in a payload, on host and device.
#pragma once

namespace hybridcomp {

enum Status : int {
  kOk = 0,
  kBadLength = 1,         // the payload is not as long as its counts say
  kBadBlock = 2,          // a block size out of range, or reserved bits set
  kBadIndexCount = 3,     // the blocks' counts do not add up to the number of values
  kBadIndexOrder = 4,     // indices of a block not strictly ascending
  kBadIndexRange = 5,     // an index, or a bit of a bitmap, past the end of its block
  kBadBitmap = 6,         // a bitmap with another number of bits than its block's count
  kOtherValues = 7,       // not wrong: values that went through a codec, or of another type
  kOtherCodec = 8,        // not wrong: a codec that is decoded elsewhere
  kBadBound = 16,         // an error bound that is negative, infinite or NaN
  kBadBoundedBlock = 17,  // not the block size of this version
  kBadBoundedCode = 18,   // a block code that does not exist
  kBadCoder = 19,         // a coder of integers that does not exist, or its unit out of range
  kBadWindow = 20,        // a row that refers to one that does not exist
  kBadCodeLengths = 21,   // lengths of a Huffman code that are too long, or no complete code
  kBadZfpBits = 24,       // zfp: bits per block out of range for the dtype, or reserved bits set
  kBadLag = 32,           // a lag out of range, or reserved bits set
  kBadZeros = 33,         // a chunk not as long as its bitmap says
  kBadExponentCode = 34,  // a block code that does not exist, or one that saves nothing
  kBadEscapes = 35,       // another number of escapes among a block's fields than its code says
  kBadLattice = 48,       // the integers' width or the room for contributions is out of range
  kBadScale = 49,         // a scale is negative, infinite or not of its type
  kBadFormat = 56,        // a number format that the codec does not have
  kBadMxBlock = 57,       // a microscaling block that is not of 32 elements
};

}  // namespace hybridcomp
