// Elements that the codec `bounded` keeps bit for bit.
#include <cstring>

#include "codecs/bounded/coders.hpp"
#include "codecs/convert/convert.hpp"

namespace hybridcomp {

void put_kept(const Kernels& k, const std::uint8_t* elements, DTypeCode dtype, std::size_t m,
              const BoundedOut& out) {
  if (dtype == out.dtype && !out.add)
    std::memcpy(out.data, elements, m * size_of(dtype));
  else
    k.convert->convert(elements, dtype, out.data, out.dtype, m, out.add);
}

}  // namespace hybridcomp
